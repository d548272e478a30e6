"""What a role of your own is made of: a worker, and a loop over the samples of its topic."""

from relax_events.config import RunConfig
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.processors import SampleLoop, SingleSamples, WholePromptGroups
from relax_events.runtime.worker import Worker

__all__ = ["RunConfig", "SampleLoop", "SingleSamples", "WholePromptGroups", "Worker", "open_worker"]
