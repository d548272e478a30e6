from relax_events.launcher.run_handle import Run as Run
from relax_events.launcher.run_handle import attach as attach
from relax_events.launcher.run_handle import train as train

__version__: str
FACE: tuple[str, ...]
