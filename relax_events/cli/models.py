"""`relax models`: small models made on this machine, their supervised start, and the export of a
run's model.
"""

from pathlib import Path

from cyclopts import App

from relax_events.cli.model_convert import convert
from relax_events.cli.model_export import export
from relax_events.cli.output import print_progress
from relax_events.cli.parameters import Overrides, RunFile

app = App(
    name="models",
    help=(
        "Export the model of a run, convert models, and make small ones for trying things out."
        "\n\nExample: relax models prepare configs/quickstart.toml"
    ),
    version_flags=[],  # --version names a policy version
)
app.command(export)
app.command(convert)


@app.command
def prepare(config: RunFile, *overrides: Overrides) -> None:
    """Make the model that a run file describes, with its SFT warm-up, unless it is there; print its
    folder.

    Example: relax models prepare configs/quickstart.toml

    Objects that lie on this machine get their folder too, with the run's name in it: then workers
    that may only read there can start first.
    """
    from relax_events.config import load_run_config
    from relax_events.examples.model_preparation import prepare_model
    from relax_events.objects.marker import claim_store
    from relax_events.objects.store import ObjectStore

    loaded = load_run_config(config, overrides)
    print(prepare_model(loaded, report=print_progress))
    if loaded.objects_uri.startswith("file:"):
        claim_store(ObjectStore.open(loaded.objects_uri, waits=False), run_id=loaded.run.id)


@app.command(name="sft-warmup")
def sft_warmup(config: RunFile, *overrides: Overrides, output: Path | None = None) -> None:
    """Train the model of a run file on reference answers for `sft_warmup.steps` steps; print the
    folder written.

    Example: relax models sft-warmup configs/quickstart.toml --output .relax/models/warm

    Args:
        output: Folder of the trained model; by default it replaces the old one.
    """
    from relax_events.config import load_run_config
    from relax_events.examples.model_preparation import warm_up_model

    print(warm_up_model(load_run_config(config, overrides), output=output, report=print_progress))


@app.command(name="make-tiny")
def make_tiny(
    path: Path, *, config: Path | None = None, corpus: Path | None = None, seed: int = 0
) -> None:
    """Write a tiny random model with a tokenizer of its own; print its folder.

    Example: relax models make-tiny .relax/models/tiny --config configs/quickstart.toml

    Args:
        path: The folder to write.
        config: A run file: its data trains the tokenizer, its [model.tiny] sizes the model.
        corpus: A text file that trains the tokenizer, without a run file.
        seed: Of the random weights, without a run file.
    """
    from relax_events.errors import ConfigError

    if (config is None) == (corpus is None):
        raise ConfigError(
            "relax models make-tiny needs either --config RUN.toml or --corpus FILE, for the "
            "tokenizer"
        )
    print(
        _from_run_file(path, config)
        if config
        else _from_corpus(path, corpus, seed)
        if corpus
        else ""
    )


def _from_run_file(path: Path, run_file: Path) -> Path:
    from relax_events.config import load_run_config
    from relax_events.config.engine import TinyModelConfig
    from relax_events.examples.model_preparation import make_tiny_for

    config = load_run_config(run_file)
    tiny = config.model.tiny or TinyModelConfig()
    return make_tiny_for(
        config.data,
        path,
        tiny=tiny,
        seed=config.run.seed,
        assistant_turns_key=config.sft_warmup.assistant_turns_key,
    )


def _from_corpus(path: Path, corpus: Path, seed: int) -> Path:
    from relax_events.errors import ConfigError
    from relax_events.examples.tiny_models import make_tiny as write_tiny

    try:
        lines = corpus.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"corpus {corpus} can't be read: {error}; give a text file to --corpus"
        ) from None
    return write_tiny(path, corpus=lines, seed=seed)
