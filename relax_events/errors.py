"""Every error that Relax Events raises on purpose, and what a worker does with it.

RelaxError                      exit with its `exit_code`; the text names the thing, the value, the rule and the remedy
├── ConfigError                 exit 2: the run file, a flag or the environment is wrong
├── EnvironmentProblem          exit 2: this machine lacks something the run needs (Java, disk, a network)
├── BrokerError                 exit 3: the broker said no, or nothing
│   ├── BrokerUnavailable       retry until the deadline, then exit 3
│   ├── BrokerRefused           exit 4: policy, or a request that the broker will never accept
│   │   └── AccessDenied        exit 4: the broker does not let us in, or we have no right to what we asked for
│   ├── ClientFailed            exit 3: a client of ours does nothing any more; the worker that starts next has a new one
│   └── Fenced                  exit 7: another instance took over this role; stop at once, write nothing
├── SchemaError                 exit 5: writer and reader do not understand each other
├── CorruptRecord               dead-letter the record and go on
├── PoisonSample                dead-letter the record, end its prompt group as failed, go on
│   └── MediaError              the same; before its row is issued, pass over the row with the reason
├── RewardError                 score the sample as failed with a counted reason, go on
├── ObjectError                 treat the record as poison: the referenced object is missing or altered
├── StoreUnavailable            wait for the object store, heartbeats continuing; past the deadline exit 8, to be started again
├── WeightsError                keep serving the version at hand, report, try the next publication
├── EngineFailed                exit 1: the inference server is lost; the leases are free, and the worker that starts next has a new one
├── CheckFailed                 exit 6: a check ran and found something
└── RunFailed                   exit 1: the run ended without reaching its goal
    ├── Interrupted             exit 130 after Ctrl-C (SIGINT), 143 after SIGTERM: `relax run` drained; the same command resumes the run
    ├── RankLost                exit 1: another rank of the trainer died or hangs; all ranks start again
    └── StepNotFinite           skip the update and commit the step with the weights before it; `trainer.max_steps_not_finite` in a row end the run
"""


class RelaxError(Exception):
    """Something that a person can act upon; the text says what and how."""

    exit_code = 1


class ConfigError(RelaxError):
    """The run file, a flag or the environment is wrong."""

    exit_code = 2


class EnvironmentProblem(RelaxError):
    """This machine lacks something that the run needs."""

    exit_code = 2


class BrokerError(RelaxError):
    """The broker refused, failed or could not be reached."""

    exit_code = 3


class BrokerUnavailable(BrokerError):
    """The broker did not answer before the deadline."""


class BrokerRefused(BrokerError):
    """The broker answered no, and will again."""

    exit_code = 4


class AccessDenied(BrokerRefused):
    """The broker does not let this principal in, or not do this."""


class ClientFailed(BrokerError):
    """A client met what it can't go on from; only a new one can, and the worker that starts next
    has one.
    """


class Fenced(BrokerError):
    """Another instance with the same transactional id took over."""

    exit_code = 7


class SchemaError(RelaxError):
    """Writer and reader do not understand each other's schema."""

    exit_code = 5


class CorruptRecord(RelaxError):
    """The bytes of a record are not what its framing promises."""


class PoisonSample(RelaxError):
    """A well-formed record holds values that no worker can use."""


class ForeignRecord(PoisonSample):
    """A record says what its writer may not say, or what no worker of the run would: it becomes a
    dead letter and changes nothing.
    """


class MediaError(PoisonSample):
    """A picture, a sound or a clip is missing, hostile, or not what it is said to be."""

    def __init__(self, text: str, *, reason: str) -> None:
        """Say what is wrong.

        Args:
            text: Names the piece of media, the value and the rule.
            reason: The same in a word, such as `truncated`, to count by.
        """
        super().__init__(text)
        self.reason = reason


class RewardError(RelaxError):
    """A reward function raised, hung, died or returned no finite number."""


class ObjectError(RelaxError):
    """A referenced object is missing, unreadable, or not the one that was stored."""


class StoreUnavailable(RelaxError):
    """An object store does not answer, lets nobody in, or is full: nothing is wrong with the
    object.
    """

    exit_code = 8


class WeightsError(RelaxError):
    """A weight artifact is incomplete, altered or does not fit the model."""


class EngineFailed(RelaxError):
    """An inference server can't be had any more, or does what nobody told it to."""


class CheckFailed(RelaxError):
    """A check ran to its end and found something."""

    exit_code = 6


class RunFailed(RelaxError):
    """The run ended without reaching its goal."""


class Interrupted(RunFailed):
    """A signal asked `relax run` to end before its goal."""

    def __init__(self, text: str, *, signal_number: int) -> None:
        """Say what was interrupted.

        Args:
            text: Names the run, and what resumes it.
            signal_number: The signal; the exit code is the shell's for it.
        """
        super().__init__(text)
        self.exit_code = 128 + signal_number


class RankLost(RunFailed):
    """Another rank of the trainer died or hangs; what it died of stands in its own log."""


class StepNotFinite(RunFailed):
    """A loss or a gradient is no finite number; the weights are those before the step."""
