"""The error tree: every error that Relax Events raises, and what a worker does with it.

RelaxError                 exit with its `exit_code`; its text names object, value, rule and remedy
├── ConfigError            exit 2: the run file, a flag or the environment is wrong
├── EnvironmentProblem     exit 2: this machine lacks something (Java, disk space, a network)
├── BrokerError            exit 3: the broker refused the request or did not respond
│   ├── BrokerUnavailable  retry until the deadline, then exit 3
│   ├── BrokerRefused      exit 4: the broker will never accept the request
│   │   └── AccessDenied   exit 4: authentication failed, or an ACL is missing
│   ├── ClientFailed       exit 3: a Kafka client stopped working; restart the worker
│   └── Fenced             exit 7: another instance of the role took over; stop, write nothing
├── SchemaError            exit 5: the schemas of writer and reader are incompatible
├── CorruptRecord          dead-letter the record and continue
├── PoisonSample           dead-letter the record, end its prompt group as failed, continue
│   ├── ForeignRecord      the same; the producer may not write such a record
│   └── MediaError         the same; while prompts are read, skip the row with the reason
├── OutOfMemory            train or score again in smaller passes; end the prompt group with a path
│                          that does not fit alone, continue
├── RewardError            score the sample as failed, count the reason, continue
├── ObjectError            treat the record as a PoisonSample: an object is missing or altered
├── StoreUnavailable       wait for the object store; exit 8 after the deadline, to be restarted
├── WeightsError           keep serving the current policy version, log, try the next version
│   └── DamagedTensors     the same; in a model's folder it is a ConfigError: exit 2
├── EpisodeFailed          begin the episode again, which uses an attempt (`environment.attempts`)
├── SessionLost            begin the episode again without using an attempt
├── EpisodeLate            end the sample as late, with `reward.on_timeout` as its reward
├── EngineFailed           exit 1: the inference server failed; restart the worker
├── CheckFailed            exit 6: a check completed and found a problem
└── RunFailed              exit 1: the run ended without reaching its goal
    ├── Interrupted        exit 130 (SIGINT) or 143 (SIGTERM); the same command resumes the run
    ├── RankLost           exit 1: another trainer rank died or hangs; all ranks restart
    └── StepNotFinite      commit the step with the previous weights; after
                           `trainer.max_steps_not_finite` consecutive ones end the run
"""

from __future__ import annotations

from pathlib import Path


class RelaxError(Exception):
    """An error that an operator can act upon; its text says what failed and what to do."""

    exit_code = 1


class ConfigError(RelaxError):
    """The run file, a flag or the environment is wrong."""

    exit_code = 2


class EnvironmentProblem(RelaxError):
    """This machine lacks something that the run needs, such as Java, disk space or a network."""

    exit_code = 2


class BrokerError(RelaxError):
    """The broker refused, failed or could not be reached."""

    exit_code = 3


class BrokerUnavailable(BrokerError):
    """The broker did not respond before the deadline."""


class BrokerRefused(BrokerError):
    """The broker refused the request and will refuse it again."""

    exit_code = 4


class AccessDenied(BrokerRefused):
    """Authentication failed, or this principal lacks the permission."""


class ClientFailed(BrokerError):
    """A Kafka client met an error from which it cannot recover; the worker must restart to get a
    new client.
    """


class Fenced(BrokerError):
    """Another instance with the same transactional id took over this role."""

    exit_code = 7


class SchemaError(RelaxError):
    """The schemas of writer and reader are incompatible."""

    exit_code = 5


class CorruptRecord(RelaxError):
    """The bytes of a record do not match its framing."""


class PoisonSample(RelaxError):
    """A well-formed record holds values that no worker can process."""


class ForeignRecord(PoisonSample):
    """A record holds an event that its producer may not write or that no worker of the run
    produces. It becomes a dead letter and has no other effect.
    """


class MediaError(PoisonSample):
    """An image, audio or video file is missing, hostile, or not of its declared kind."""

    def __init__(self, text: str, *, reason: str) -> None:
        """Create the error.

        Args:
            text: Names the media file, the value and the rule.
            reason: The same in one word for the error counter, such as `truncated`.
        """
        super().__init__(text)
        self.reason = reason


class OutOfMemory(RelaxError):
    """A pass of a model does not fit its device; gradients may hold a part of it."""

    def __init__(self, text: str, *, sample_id: str, num_paths: int, num_cells: int) -> None:
        """Create the error.

        Args:
            text: Names the sample, the size of the pass and the remedy.
            sample_id: Of the first path of the pass.
            num_paths: Of the pass; a pass of one path can't be smaller.
            num_cells: Of the pass; of a path alone without padding.
        """
        super().__init__(text)
        self.sample_id, self.num_paths, self.num_cells = sample_id, num_paths, num_cells


class RewardError(RelaxError):
    """A reward function raised, hung, died or returned no finite number."""


class ObjectError(RelaxError):
    """A referenced object is missing, unreadable, or differs from the stored one."""


class StoreUnavailable(RelaxError):
    """An object store does not respond, denies access, or is full; the object itself may be
    intact.
    """

    exit_code = 8


class WeightsError(RelaxError):
    """A weight artifact is incomplete, altered or does not fit the model."""


class DamagedTensors(ConfigError, WeightsError):
    """A safetensors file, or the index of several, is truncated, altered or of another format."""

    def __init__(self, file: Path | str, rule: str) -> None:
        """Create the error.

        Args:
            file: The file.
            rule: What the file breaks, with the value seen.
        """
        super().__init__(f"{file} is damaged: {rule}; fetch or write it again")


class EpisodeFailed(RelaxError):
    """An episode of a program failed for a reason that is not the policy's."""


class SessionLost(RelaxError):
    """The session of an episode was lost in a process that it shares with others."""

    def __init__(self, text: str, *, is_suspect: bool) -> None:
        """Create the error.

        Args:
            text: Names the process and what happened to it.
            is_suspect: Whether this session may have caused the loss: its call was under way.
        """
        super().__init__(text)
        self.is_suspect = is_suspect


class EpisodeLate(RelaxError):
    """A turn of the policy made its program or its environment exceed a deadline."""


class EngineFailed(RelaxError):
    """An inference server is gone, or behaves in a way that was not requested."""


class CheckFailed(RelaxError):
    """A check completed and found a problem."""

    exit_code = 6


class RunFailed(RelaxError):
    """The run ended without reaching its goal."""


class Interrupted(RunFailed):
    """A signal asked `relax run` to end before its goal."""

    def __init__(self, text: str, *, signal_number: int) -> None:
        """Create the error.

        Args:
            text: Names the run and the command that resumes it.
            signal_number: The signal; the exit code follows the shell's convention, 128 plus this
                number.
        """
        super().__init__(text)
        self.exit_code = 128 + signal_number


class RankLost(RunFailed):
    """Another rank of the trainer died or hangs; the cause is in that rank's log."""


class StepNotFinite(RunFailed):
    """A loss or gradient is not finite; the weights are those before the step."""
