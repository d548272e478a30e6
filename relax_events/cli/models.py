"""`relax models`: the model of a run file, and models as folders that other programs load."""

from pathlib import Path

from cyclopts import App

from relax_events.cli.output import print_progress
from relax_events.cli.parameters import Overrides

app = App(
    name="models",
    help=(
        "Make the model of a run file, and export models in other forms.\n\nExample: relax models "
        "prepare configs/quickstart.toml"
    ),
    version_flags=[],  # --version names a policy version
)
app.command("relax_events.cli.model_export:export", name="export")


@app.command
def prepare(
    config: Path | None = None,
    *overrides: Overrides,
    warm_up: bool = False,
    to: Path | None = None,
    corpus: Path | None = None,
    seed: int = 0,
) -> None:
    """Make the model that a run file describes, with its SFT warm-up, unless it is there, and fetch
    what it names on the Hugging Face hub; print the model's folder.

    Example: relax models prepare configs/quickstart.toml

    Objects that lie on this machine get their folder too, with the run's name in it: then workers
    that may only read there can start first.

    Args:
        config: The run file, TOML.
        warm_up: Train the model on reference answers for `sft_warmup.steps` steps, also one that is
            there.
        to: With --warm-up or --corpus, the folder to write; by default the model is replaced.
        corpus: Instead of a run file: a text file that trains the tokenizer of a tiny random model.
        seed: Of the random weights, with --corpus.
    """
    from relax_events.config import load_run_config
    from relax_events.config.hub_names import find_model_name
    from relax_events.errors import ConfigError
    from relax_events.launcher.hub_download import find_commit
    from relax_events.launcher.preparation import fetch_named
    from relax_events.objects.marker import claim_store
    from relax_events.objects.store import ObjectStore
    from relax_events.packages.examples.model_preparation import prepare_model, warm_up_model

    if (config is None) == (corpus is None):
        raise ConfigError("relax models prepare takes a run file, or --corpus FILE; give one")
    if corpus is not None:
        print(_make_from_corpus(to, corpus, seed))
    elif config is not None:
        if to is not None and not warm_up:
            raise ConfigError("--to is for --warm-up; set model.path for the model of the run file")
        settings = load_run_config(config, overrides, find_commit=find_commit)
        fetch_named(settings, report=print_progress)
        if warm_up:
            if to is None and (name := find_model_name(settings.model.path)) is not None:
                raise ConfigError(f"{name} is in the hub's cache, which is not written; give --to")
            print(warm_up_model(settings, output=to, report=print_progress))
            return
        print(prepare_model(settings, report=print_progress))
        if settings.objects_uri.startswith("file:"):
            store = ObjectStore.open(settings.objects_uri, waits=False)
            claim_store(store, run_id=settings.run.id)


def _make_from_corpus(path: Path | None, corpus: Path, seed: int) -> Path:
    from relax_events.errors import ConfigError
    from relax_events.packages.examples.tiny_models import make_tiny

    if path is None:
        raise ConfigError("--corpus needs --to FOLDER, where the model is written")
    try:
        lines = corpus.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"corpus {corpus} can't be read: {error}; give a text file to --corpus"
        ) from None
    return make_tiny(path, corpus=lines, seed=seed)
