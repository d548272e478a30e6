"""Packages stand on `relax_events.api`, and the core stands without them."""

from __future__ import annotations

from pathlib import Path

from tests import sizes

ROOT = Path(__file__).parents[3]
COMPOSITION = {
    "relax_events.cli.models": "`relax models prepare` makes a tiny model and warms it up",
    "relax_events.cli.model_export": "`relax models export` also converts, by the package",
    "relax_events.cli.serve": "`relax serve` answers in the gateway's dialects",
    "relax_events.cli.dashboard": "`relax dashboard` serves the page, by the package",
    "relax_events.attacks.attacked_run": "attacks run on a tiny model",
    "relax_events.attacks.doors.checkpoints": "they go through every wall, the packages' too",
    "relax_events.attacks.doors.http": "likewise",
    "relax_events.attacks.gateway_session": "likewise",
    "relax_events.attacks.right_programs": "likewise",
    "relax_events.attacks.unfinished_tests": "likewise",
}
"""Modules outside the packages that may name one, and why."""


def find_package_imports(root: Path) -> dict[str, set[str]]:
    """Return the modules of packages that each module outside of them imports."""
    modules = sizes.read_modules(root)
    names = frozenset(module.name for module in modules if module.is_in_packages)
    imports = {
        module.name: sizes.find_imports(module, names, with_types=True)
        for module in modules
        if not module.is_in_packages
    }
    return {name: targets for name, targets in imports.items() if targets}


def test_core_names_no_package_but_where_the_program_is_put_together() -> None:
    assert find_package_imports(ROOT).keys() == COMPOSITION.keys()


def test_verifiers_import_the_api_only() -> None:
    past = sizes.list_imports_past_the_api(sizes.read_modules(ROOT))
    assert {package for package, _ in past} == {"dashboard", "examples", "gateway", "megatron"}


def test_import_of_a_package_and_past_the_api_is_found(tmp_path: Path) -> None:
    for name, text in {
        "engines/one": "from relax_events.packages.graders.right import grade",
        "api/rewards": "from relax_events.engines import one",
        "packages/graders/right": "from relax_events.api.rewards import one",
        "packages/graders/wrong": "from relax_events.engines import one",
    }.items():
        path = tmp_path / "relax_events" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert find_package_imports(tmp_path) == {
        "relax_events.engines.one": {"relax_events.packages.graders.right"}
    }
    past = sizes.list_imports_past_the_api(sizes.read_modules(tmp_path))
    assert past == [("graders", "relax_events.engines.one")]
