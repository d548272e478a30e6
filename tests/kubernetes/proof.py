"""Prove the chart on a real cluster: `make kubernetes`. Any cluster that kubectl reaches will do, on
whose nodes the images are, and which has volumes for two releases.

The quickstart's release reaches its goal, and another one trains with two ranks. Then a run without
an end has a pod of every role deleted, a node drained, rollout scaled by the API and by KEDA, and an
upgrade rolled out. A second release runs next to it. At the end the first gets a goal. Each ledger
is checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from benchmarks import report
from benchmarks.report import FOLDER
from tests.kubernetes import faults, resources
from tests.kubernetes.cluster import ROOT, Cluster, KubernetesError, ProofLog
from tests.kubernetes.faults import QUICKSTART, Recovery, measure
from tests.kubernetes.release import Release, StepReader
from tests.page_login import log_in, login_headers

ROLES = (
    "kafka", "controller", "metrics", "prompter", "rollout", "reward", "reference", "actor-forward",
    "advantage", "trainer",
)  # fmt: skip
STAGES = (
    "resources", "quickstart", "ranks", "delete", "kill", "drain", "scale", "keda", "upgrade", "second",
)  # fmt: skip
SCALED = {"scale", "keda"}
"""Stages in which KEDA scales."""
START_SECONDS, RUN_SECONDS = 900.0, 2400.0
GOAL_REWARD, LAST_STEPS = 0.8, 10
ENDLESS, STEPS_LEFT, FEW_STEPS = 1_000_000, 20, 15
KIND = ROOT / "deploy" / "helm" / "relax-events" / "values-kind.yaml"
TOKEN_SECRET = "scaling-token"  # the name of a Secret
SCALING_TOKEN = ("--set", f"scaling.tokenSecret={TOKEN_SECRET}")
OWN_FOLDER = ROOT / ".relax" / "kubernetes"
"""Where the log is, and the report unless all stages were run."""
QUESTION = """The chart on a real cluster. Seconds of a fault: from the call until it returned, for a
deleted pod until it was gone; and from then to the first committed train step whose prompts were
issued after it. `delete` is SIGTERM and the time to drain, `kill` is `--force --grace-period=0`."""


@dataclass
class Proof:
    """What was proven so far."""

    cluster: Cluster
    values: Sequence[str]
    upgrade: Sequence[str]
    folder: Path
    prometheus: str = ""
    recoveries: list[Recovery] = field(default_factory=list)
    scaled: list[tuple[str, float, float]] = field(default_factory=list)
    scaled_by_keda: list[tuple[str, float]] = field(default_factory=list)
    ledgers: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)

    def state(self, fact: str) -> None:
        """Log what was seen, and keep it for the report."""
        self.facts[fact] = "yes"
        self.cluster.log.write(fact)

    def release(self, name: str, *, num_steps: int = 60, words: Sequence[str] = ()) -> Release:
        """Return a release of the quickstart's task, with another number of train steps."""
        given = [word for file in self.values for word in ("--values", file)]
        return Release(self.cluster, name, self.write_run_file(name, num_steps), [*given, *words])

    def write_run_file(self, name: str, num_steps: int) -> Path:
        """Write the quickstart's run file with another goal; a rate of learning that knows no end
        where there is none.
        """
        text = QUICKSTART.read_text().replace("num_steps = 60", f"num_steps = {num_steps}")
        if name == "faults":
            text = text.replace('schedule = "linear"', 'schedule = "constant"')
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path

    def finish(self, release: Release, steps: StepReader) -> None:
        """Wait for the end of a run and check its ledger; raises KubernetesError."""
        seconds = self.cluster.wait_until(
            lambda: release.has_ended, seconds=RUN_SECONDS, what=f"the end of {release.name}"
        )
        self.cluster.log.write(
            f"{release.name}: over after {steps.num_steps} train steps, {seconds:.0f} s of waiting"
        )
        ledger = release.check_ledger()
        self.ledgers[release.name] = ledger
        trained = ledger["outcomes"]["trained"]
        self.cluster.log.write(f"{release.name}: ledger clean, {trained} prompt groups trained")


@contextmanager
def installed(proof: Proof, release: Release) -> Iterator[StepReader]:
    """Install a release for the block, wait for its first train step, and remove it again."""
    log = proof.cluster.log
    release.uninstall()
    started = time.monotonic()
    release.install()
    log.write(f"{release.name}: installed in {time.monotonic() - started:.1f} s")
    steps = release.steps()
    try:
        steps.wait_for(0, seconds=START_SECONDS, what=f"the first train step of {release.name}")
        seconds = steps.first_step_at - started
        proof.facts[f"{release.name}: from helm install to the first train step"] = f"{seconds:.0f}"
        log.write(f"{release.name}: first train step {seconds:.1f} s after helm install")
        yield steps
        release.uninstall()
        log.write(f"{release.name}: uninstalled")
    finally:
        steps.close()


def prove_quickstart(proof: Proof) -> None:
    """The quickstart as the how-to has it, up to its goal, and its page.

    Raises:
        KubernetesError: It did not reach its goal.
    """
    started = time.monotonic()
    release = proof.release("quickstart")
    with installed(proof, release) as steps:
        release.wait_until_ready("dashboard")
        with proof.cluster.forwarded("deployment/quickstart-dashboard", 8321) as url:
            read_page(url, "quickstart", link=release.create_link())
        proof.cluster.log.write("quickstart: its page answers through kubectl port-forward")
        proof.finish(release, steps)
        proof.facts["quickstart: from helm install to the end"] = (
            f"{time.monotonic() - started:.0f}"
        )
        last = [steps.rewards[step] for step in sorted(steps.rewards)[-LAST_STEPS:]]
        first, reached = steps.rewards[min(steps.rewards)], sum(last) / len(last)
        proof.facts["quickstart: mean reward of the first step"] = f"{first:.2f}"
        proof.facts[f"quickstart: mean reward of the last {LAST_STEPS} steps"] = f"{reached:.2f}"
        proof.cluster.log.write(f"quickstart: mean reward {first:.2f} -> {reached:.2f}")
        if reached < GOAL_REWARD:
            raise KubernetesError(f"mean reward {reached:.3f}, the goal is {GOAL_REWARD}")


def prove_ranks(proof: Proof) -> None:
    """A trainer of two ranks, each in a pod of its own; raises KubernetesError."""
    release = proof.release(
        "ranks", num_steps=FEW_STEPS, words=["--set", "roles.trainer.replicas=2"]
    )
    with installed(proof, release) as steps:
        release.wait_until_ready("trainer", 2)
        proof.finish(release, steps)


def read_page(url: str, run_id: str, *, link: str) -> None:
    """Read a run's summary from the dashboard; raises OSError where it does not answer.

    Args:
        url: The forwarded address.
        run_id: The run.
        link: That opens the page, of the address within the pod.
    """
    import urllib.request

    address = log_in(f"{url}/?{link.partition('/?')[2]}")
    summary = f"{address}/api/runs/{run_id}/summary"
    request = urllib.request.Request(summary, headers=login_headers(address))
    with urllib.request.urlopen(request, timeout=60) as response:
        json.loads(response.read())


def prove_faults(proof: Proof, stages: Sequence[str]) -> None:
    """A run without an end, what is done to it, a second run next to it, and its end."""
    token = token_hex(32)
    cluster = proof.cluster
    cluster.kubectl("delete", "secret", TOKEN_SECRET, "--ignore-not-found")
    cluster.kubectl("create", "secret", "generic", TOKEN_SECRET, f"--from-literal=token={token}")
    keda = f"scaling.by=api,scaling.keda.prometheus={proof.prometheus}"
    words = ["--set", keda, *SCALING_TOKEN] if proof.prometheus else []
    release = proof.release("faults", num_steps=ENDLESS, words=words)
    with installed(proof, release) as steps:
        for stage in ("delete", "kill"):
            for role in ROLES if stage in stages else ():
                work = partial(faults.delete, release, role, force=stage == "kill")
                proof.recoveries.append(measure(release, steps, role, stage, work))
        if "drain" in stages:
            proof.recoveries.append(
                measure(
                    release, steps, "the trainer's node", "drain", partial(faults.drain, release)
                )
            )
        if "scale" in stages:
            proof.scaled = faults.scale(release, token)
        if "keda" in stages:
            proof.scaled_by_keda = faults.scale_by_keda(release, proof.prometheus)
        if "upgrade" in stages:
            release.words += ["--set", "drainSeconds=25", *proof.upgrade]
            proof.recoveries.append(
                measure(release, steps, "all pods", "helm upgrade", partial(upgrade, release))
            )
        second = prove_second if "second" in stages else end
        second(proof, release, steps)


def upgrade(release: Release) -> None:
    """Upgrade a release, and wait until all its workloads are rolled out."""
    release.install()
    for kind in ("deployment", "statefulset"):
        for found in release.cluster.get(
            kind, "--selector", f"app.kubernetes.io/instance={release.name}"
        )["items"]:
            name = f"{kind}/{found['metadata']['name']}"
            release.cluster.kubectl("rollout", "status", name, "--timeout=300s", seconds=310)


def end(proof: Proof, release: Release, steps: StepReader) -> None:
    """Give the run without an end a near goal by an upgrade, and wait for it."""
    proof.write_run_file(release.name, steps.num_steps + STEPS_LEFT)
    release.install()
    proof.finish(release, steps)


def prove_second(proof: Proof, release: Release, steps: StepReader) -> None:
    """A second release with a broker of its own, while the first one runs to its end."""
    second = proof.release("second", num_steps=FEW_STEPS)
    with installed(proof, second) as second_steps:
        end(proof, release, steps)
        proof.finish(second, second_steps)


def prove_resources(proof: Proof, folder: Path | None) -> None:
    """Have the API server check what the chart makes, and a release's changes; no pod need run.

    Raises:
        KubernetesError: It refuses one.
    """
    cluster = proof.cluster
    if folder is not None:
        resources.define_operators(cluster, folder)
    for name in ("cluster", "existing") if folder is not None else ():
        number = resources.count_accepted(cluster, name, QUICKSTART)
        proof.state(f"the API server accepts all {number} resources of values-{name}.yaml")
    release = proof.release("changes", words=[])
    release.uninstall()
    release.install()
    resources.upgrade_repeatedly(release)
    number = len(resources.CHANGES)
    proof.state(
        f"{number} upgrades of changed values and a rollback are accepted by the API server"
    )
    release.uninstall()


def write_report(proof: Proof, machine: str, folder: Path) -> None:
    """Write kubernetes.md and kubernetes.json."""
    tables = {
        "Recoveries": [
            {
                "what": one.what,
                "fault": one.how,
                "returned after": f"{one.ending_seconds:.1f}",
                "over it after": f"{one.seconds:.1f}",
            }
            for one in proof.recoveries
        ],
        "Rollout workers, scaled by the API": [
            {"scaled": what, "pods after": f"{pods:.1f}", "request fulfilled after": f"{done:.1f}"}
            for what, pods, done in proof.scaled
        ],
        "Rollout workers, scaled by KEDA": [
            {"scaled": what, "pods after": f"{seconds:.1f}"}
            for what, seconds in proof.scaled_by_keda
        ],
        "Ledgers": [
            {
                "release": name,
                "prompt groups trained": found["outcomes"]["trained"],
                "problems": "none",
            }
            for name, found in proof.ledgers.items()
        ],
        "Further": [{"what": what, "value": value} for what, value in proof.facts.items()],
        "Log": proof.cluster.log.lines,
    }
    report.write(
        "kubernetes",
        title="The chart on a real cluster",
        question=QUESTION,
        command="make kubernetes",
        conclusion=f"{len(proof.recoveries)} faults; {len(proof.ledgers)} ledgers, all clean. {machine}.",
        tables={heading: table for heading, table in tables.items() if table},
        data={"recoveries": [vars(one) for one in proof.recoveries], "ledgers": proof.ledgers},
        folder=folder,
    )


def prove(arguments: argparse.Namespace, log: ProofLog) -> None:
    """Run the stages that the command line names.

    Raises:
        KubernetesError: No cluster answers, or a stage failed.
    """
    cluster = Cluster(arguments.namespace, log)
    machine = cluster.require()
    log.write(machine)
    if not cluster.kubectl("get", "namespace", cluster.namespace, "--ignore-not-found"):
        cluster.kubectl("create", "namespace", cluster.namespace)
    stages: list[str] = arguments.stages or [
        stage for stage in STAGES if stage not in SCALED or arguments.prometheus
    ]
    if SCALED & set(stages) and not arguments.prometheus:
        raise KubernetesError("the stages scale and keda need --prometheus, which KEDA is to ask")
    with tempfile.TemporaryDirectory() as folder:
        values = [str(KIND), *arguments.values]
        proof = Proof(
            cluster, values, arguments.upgrade.split(), Path(folder), arguments.prometheus
        )
        work: list[Callable[[], None]] = []
        if "resources" in stages:
            work.append(partial(prove_resources, proof, arguments.crds))
        if "quickstart" in stages:
            work.append(partial(prove_quickstart, proof))
        if "ranks" in stages:
            work.append(partial(prove_ranks, proof))
        if set(stages) - {"resources", "quickstart", "ranks"}:
            work.append(partial(prove_faults, proof, stages))
        for one in work:
            one()
        write_report(proof, machine, FOLDER if set(stages) >= set(STAGES) - SCALED else OWN_FOLDER)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kubernetes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--stages", nargs="+", choices=STAGES, help="all, where not given")
    parser.add_argument("--namespace", default="relax-proof", help="is created where it is missing")
    parser.add_argument("--values", action="append", default=[], help="a further values file")
    parser.add_argument(
        "--prometheus", default="",
        help="address, from within the cluster, of a Prometheus that scrapes the releases as their "
        "ServiceMonitor says; with it, and where KEDA runs, rollout is scaled, by the API and by its queue",
    )  # fmt: skip
    parser.add_argument("--upgrade", default="", help="helm's options for the upgrade: new images")
    parser.add_argument(
        "--crds", type=Path, help="folder with the operators' CustomResourceDefinitions, *.yaml.gz"
    )
    arguments = parser.parse_args()
    OWN_FOLDER.mkdir(parents=True, exist_ok=True)
    with (OWN_FOLDER / "proof.log").open("w") as file:
        log = ProofLog(file)
        try:
            prove(arguments, log)
        except KubernetesError as error:
            log.write(f"failed: {error}")
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0
