"""All places where foreign bytes enter: children with the profile in which they touch them, and the
bounds within which a process reads them itself.

A child process can't be started without an entry point; a test compares this list with the plugins
that the package installs and with the modules that are children, and the attack suite goes through
it (`relax doctor --attack`). The table in `docs/explanation/security.md` is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from relax_events.confinement.profiles import Profile


class Door(StrEnum):
    """Where foreign bytes come from."""

    COMPLETION = "completion"
    ROW = "data row"
    REPLY = "environment's reply"
    JUDGE_REPLY = "judge's reply"
    POLICY_REPLY = "policy server's reply"
    MEDIA = "media file"
    TEMPLATE = "chat template"
    CHECKPOINT = "checkpoint"
    ARCHIVE = "run archive"
    HTTP = "HTTP request"
    RECORD = "record"
    STORE = "object store"
    SETTINGS = "run file or description"


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A place where foreign bytes enter.

    Attributes:
        name: What it is called in a run file or in the product.
        doors: What reaches it.
        profile: Its confinement.
        module: The module of the child process that touches them.
        why: What the profile rests on, where it is not `pure`.
    """

    name: str
    doors: tuple[Door, ...]
    profile: Profile
    module: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class BoundedPoint:
    """A place where a process of ours reads foreign bytes itself.

    Attributes:
        name: What it is called in the product.
        doors: What reaches it.
        module: The module that reads them.
        bounds: What keeps them from running code, filling the memory and leading elsewhere.
    """

    name: str
    doors: tuple[Door, ...]
    module: str
    bounds: str


REWARD_CHILD = "relax_events.rewards.child"
ENVIRONMENT_CHILD = "relax_events.environments.child"
SESSION_CHILD = "relax_events.environments.session_child"
GRADED = (Door.COMPLETION, Door.ROW)
PLAYED = (Door.COMPLETION, Door.ROW, Door.REPLY)

PURE_REWARDS = (
    "exact_match",
    "squad_exact_match",
    "f1",
    "gsm8k",
    "math",
    "deepscaler",
    "dapo_math",
    "geo3k",
    "openr1_multimodal",
    "gpqa",
    "multiple_choice",
    "ifeval",
    "ifbench",
    "reasoning_gym",
    "environment",
    "nim",
    "deepeyes",
)
SERVICE_REWARDS = ("genrm", "genrm_pairwise", "remote", "remote_group")

USER_REWARD = EntryPoint(
    "reward of the user", GRADED, Profile.TRUSTED, REWARD_CHILD, "the user's own code"
)
USER_ENVIRONMENT = EntryPoint(
    "environment of the user", PLAYED, Profile.TRUSTED, ENVIRONMENT_CHILD, "the user's own code"
)
USER_SESSIONS = EntryPoint(
    "sessions of the user's environment",
    PLAYED,
    Profile.TRUSTED,
    SESSION_CHILD,
    "the user's own code; also programs that serve tools",
)
SERVER_SESSIONS = EntryPoint(
    "sessions of a server (OpenEnv, MCP)",
    PLAYED,
    Profile.NETWORK,
    SESSION_CHILD,
    "the addresses of `environment`",
)
MEDIA_DECODER = EntryPoint(
    "media decoder", (Door.MEDIA,), Profile.PURE, "relax_events.media.decoder_child"
)
CHAT_TEMPLATE = EntryPoint(
    "chat template", (Door.TEMPLATE,), Profile.PURE, "relax_events.models.template_child"
)
CHECKPOINT_CONVERTER = EntryPoint(
    "checkpoint converter",
    (Door.CHECKPOINT,),
    Profile.PURE,
    "relax_events.packages.megatron.convert_child",
)
ENTRY_POINTS: tuple[EntryPoint, ...] = (
    *(EntryPoint(f"reward {name}", GRADED, Profile.PURE, REWARD_CHILD) for name in PURE_REWARDS),
    EntryPoint(
        "reward code",
        GRADED,
        Profile.PROGRAM,
        REWARD_CHILD,
        "passes programs to the sandbox, and reads their verdict",
    ),
    *(
        EntryPoint(
            f"reward {name}",
            (*GRADED, Door.JUDGE_REPLY),
            Profile.NETWORK,
            REWARD_CHILD,
            "the address of `reward.options.url`",
        )
        for name in SERVICE_REWARDS
    ),
    *(
        EntryPoint(f"environment {name}", PLAYED, Profile.PURE, ENVIRONMENT_CHILD)
        for name in ("zoom", "search", "deepeyes")
    ),
    EntryPoint("environment nim", PLAYED, Profile.PURE, SESSION_CHILD),
    USER_REWARD,
    USER_ENVIRONMENT,
    USER_SESSIONS,
    SERVER_SESSIONS,
    MEDIA_DECODER,
    CHAT_TEMPLATE,
    CHECKPOINT_CONVERTER,
)
PROGRAM = BoundedPoint(
    "program of the model",
    (Door.COMPLETION,),
    "relax_events.sandbox.sandbox",
    "files, calls, processes, memory and time are limited; tests run in another process",
)
PROMPT_RENDERER = BoundedPoint(
    "prompt renderer",
    (Door.ROW, Door.REPLY),
    "relax_events.data.rendering",
    "contents become text tokens, never control tokens",
)
POLICY_SERVER = BoundedPoint(
    "relax try --url",
    (Door.POLICY_REPLY,),
    "relax_events.episodes.chat_engine",
    "size and time of a reply, no compression, no redirect; its text becomes text tokens, and of "
    "control tokens the tags of a turn alone",
)
RUN_API, GATEWAY, PAGE, MODEL_SERVER = (
    BoundedPoint(
        name,
        (Door.HTTP,),
        module,
        "key before body; size, time, Host, Origin and site of a request",
    )
    for name, module in (
        ("run API", "relax_events.controller.api"),
        ("gateway", "relax_events.packages.gateway.app"),
        ("dashboard", "relax_events.packages.dashboard.app"),
        ("relax serve", "relax_events.packages.gateway.model_app"),
    )
)
RECORD_READER = BoundedPoint(
    "record reader",
    (Door.RECORD,),
    "relax_events.events.codec",
    "bytes, depth and size of a schema; values in proportion to a record's bytes",
)
RUN_IMPORT = BoundedPoint(
    "relax topics import",
    (Door.ARCHIVE,),
    "relax_events.ops.export_manifest",
    "regular files below the folder; sizes and checksums before contents",
)
OBJECT_STORE = BoundedPoint(
    "object reader",
    (Door.STORE,),
    "relax_events.objects.store",
    "keys below the store, no link followed, copies checked by size and checksum",
)
RUN_SETTINGS = BoundedPoint(
    "settings of a run",
    (Door.SETTINGS,),
    "relax_events.config",
    "secrets refused; code, files and addresses of a description listed before use",
)
BOUNDED_POINTS: tuple[BoundedPoint, ...] = (
    PROGRAM,
    PROMPT_RENDERER,
    POLICY_SERVER,
    RUN_API,
    GATEWAY,
    PAGE,
    MODEL_SERVER,
    RECORD_READER,
    RUN_IMPORT,
    OBJECT_STORE,
    RUN_SETTINGS,
)
_BY_NAME = {point.name: point for point in ENTRY_POINTS}


def find_reward(function: str) -> EntryPoint:
    """Return the entry point of a reward function; what the package does not bring is the
    user's.
    """
    return _BY_NAME.get(f"reward {function}", USER_REWARD)


def find_environment(function: str, *, has_sessions: bool) -> EntryPoint:
    """Return the entry point of an environment function or class."""
    users = USER_SESSIONS if has_sessions else USER_ENVIRONMENT
    return _BY_NAME.get(f"environment {function}", users)
