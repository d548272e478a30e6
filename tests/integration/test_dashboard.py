"""The page of a run: what it reads from a log that a test wrote, what it refuses, and how it looks
to a browser, a hostile sample included.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from event_samples import changed, ready, rolled_out, scored
from written_run import WrittenRun

from relax_events.config import RunConfig
from relax_events.events.parts import ChatMessage, Outcome
from relax_events.history.cluster import Cluster
from relax_events.kafka.records import ProducerRecord
from relax_events.packages.dashboard.access import PageAccess
from relax_events.packages.dashboard.registry import RunRegistry
from relax_events.packages.dashboard.run_page import RunPage, offer_page
from relax_events.packages.dashboard.server import build_server, build_url, open_port
from relax_events.packages.dashboard.snapshot import write_snapshot
from relax_events.reports.run_report import rewrite_report
from tests.axe import fetch_axe, find_violations
from tests.chromium import Chromium, find_chromium
from tests.page_login import log_in, login_headers

A, B, C = "000000-0000-0", "000000-0001-0", "000001-0000-0"
HOSTILE = (
    '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
    "</div></main><h1 id=injected>injected</h1>"
)
PAGES = (
    "alarms",
    "overview",
    "timeline",
    "lag",
    "samples",
    "lineage",
    "deadletters",
    "fleet",
    "config",
    "tails",
    "runs",
)
needs_chromium = pytest.mark.skipif(not find_chromium(), reason="no Chromium is installed")


@pytest.fixture(scope="module")
def written(
    bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WrittenRun]:
    """Write two steps: A and B on version 0 with a hostile completion in A, C on version 1 without a
    reward; and a dead letter."""
    from small_settings import small_run

    folder = tmp_path_factory.mktemp("dashboard")
    config = small_run(
        {
            "run": {
                "id": f"dash-{time.time_ns()}",
                "directory": str(folder),
                "max_staleness": 1,
                "samples_per_prompt": 2,
            },
            "model": {"path": str(folder / "model")},
            "data": {"source": "jsonl:unused"},
            "broker": {"bootstrap_servers": bootstrap_servers, "partitions_per_version": 1},
        }
    )
    run = WrittenRun(config)
    run.describe()
    run.publish(0)
    for row, group in enumerate((A, B, C)):
        run.issue(group, row=row)
    write_hostile(run)
    run.generate(B, version=0, rewards=[1.0, 1.0], worker_id="rollout-1")
    run.train(0, B)
    run.end(A, Outcome.FILTERED, version=0)
    run.generate(C, version=1, rewards=[None, None])
    write_dead_letter(run)
    (config.run_directory).mkdir(parents=True, exist_ok=True)
    token = config.run_directory / "api-token"
    token.write_text("secret-token")
    token.chmod(0o600)
    yield run
    run.close()


def write_hostile(run: WrittenRun) -> None:
    """Write prompt group A: its first sample tries to become a part of the page."""
    for index in range(2):
        text = HOSTILE if index == 0 else "quiet"
        paths = {"path_lengths": [3, 1], "truncated_paths": [0]} if index else {}
        sample = changed(
            rolled_out(A, index, completion=text, **paths),
            messages=[ChatMessage.of_text("user", HOSTILE)],
            metadata=json.dumps({"source": HOSTILE[:40]}),
        )
        run.write_sample("rollout.samples", sample)
        run.write_sample("reward.scores", scored(A, index, reward=float(index)))
        run.write_sample("advantage.samples", ready(A, index, reward=float(index)))


def write_dead_letter(run: WrittenRun) -> None:
    """Write a copy of a sample's record as a dead letter of the reward role."""
    origin = run.plan.topic("rollout.samples"), run.plan.partition(A, 0)
    headers = {
        "origin-topic": origin[0],
        "origin-partition": str(origin[1]),
        "origin-offset": "0",
        "error-class": "PoisonSample",
        "error-text": HOSTILE,
        "worker-id": "reward-0",
    }
    topic = run.plan.topic("reward.dead-letters")
    run.producer.write([ProducerRecord(topic, b"bytes", key=A, partition=0, headers=headers)])


@pytest.fixture(scope="module")
def url(written: WrittenRun) -> Iterator[str]:
    """Serve the page, and wait until the reader has read the log."""
    config: RunConfig = written.config
    registry = RunRegistry(Cluster(config.broker, config.run.directory), first=config)
    with open_port(0) as listener:
        access = PageAccess(written.config.run.directory)
        server = build_server(registry, access)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        address = log_in(access.create_link(build_url(listener)))
        until(lambda: summary(address, written)["num_samples"] == 6)
        until(lambda: summary(address, written)["policy_version"] == 1)
        until(lambda: summary(address, written)["step"] == 1)
        until(lambda: sum(summary(address, written)["outcomes"].values()) == 2)
        until(lambda: summary(address, written)["reader"]["is_caught_up"])
        yield address
        server.should_exit = True
        thread.join(20)
        registry.close()


def until(holds: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    stop = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < stop, "not in time"
        time.sleep(0.1)


def call(
    address: str, path: str, *, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Call a route; return status, body and headers."""
    request = urllib.request.Request(
        f"{address}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"} | login_headers(address) | (headers or {}),
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read()), dict(answer.headers)
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.loads(refusal.read()), dict(refusal.headers)


def get(address: str, run: WrittenRun, path: str) -> Any:
    """Return what a route of the run answers."""
    status, body, _ = call(address, f"/api/runs/{run.config.run.id}/{path}")
    assert status == 200, body
    return body


def summary(address: str, run: WrittenRun) -> Any:
    """Return the head of the run's pages."""
    return get(address, run, "summary")


def test_run_is_listed_and_summed_up(url: str, written: WrittenRun) -> None:
    assert written.config.run.id in {run["run_id"] for run in call(url, "/api/runs")[1]["runs"]}
    found = summary(url, written)
    assert (found["step"], found["policy_version"], found["status"]) == (1, 1, "interrupted")
    assert found["outcomes"] == {"trained": 1, "filtered": 1}


def test_samples_are_filtered_and_joined_with_their_outcomes(url: str, written: WrittenRun) -> None:
    rows = get(url, written, "samples?sort=reward&count=10")["rows"]
    assert [(row["sample_id"], row["reward"], row["outcome"]) for row in rows] == [
        (f"{A}/0", 0.0, "filtered"),
        (f"{A}/1", 1.0, "filtered"),
        (f"{B}/0", 1.0, "trained"),
        (f"{B}/1", 1.0, "trained"),
        (f"{C}/0", None, "open"),
        (f"{C}/1", None, "open"),
    ] or sorted(row["sample_id"] for row in rows[1:4]) == [f"{A}/1", f"{B}/0", f"{B}/1"]
    trained = get(url, written, "samples?outcome=trained&worker=rollout-1")
    assert {row["sample_id"] for row in trained["rows"]} == {f"{B}/0", f"{B}/1"}
    assert get(url, written, "samples?reward=..0.5")["num_matching"] == 1


def test_texts_and_details_come_from_the_log(url: str, written: WrittenRun) -> None:
    found = get(url, written, f"sample?sample_id={A}/0")
    assert found["completion"] == HOSTILE
    assert (found["score"]["reward"], len(found["group"]), found["num_tokens"]) == (0.0, 2, 4)
    assert "no tokenizer" in found["tokens_problem"] or found["tokens_problem"]
    texts = get(url, written, f"texts?rows={found['row']}")
    assert texts[str(found["row"])]["completion"] == HOSTILE[:240]


def test_lineage_leads_from_a_version_to_its_samples_and_back(
    url: str, written: WrittenRun
) -> None:
    version = get(url, written, "lineage?version=1")["version"]
    assert [sample["sample_id"] for sample in version["samples"]] == [f"{B}/0", f"{B}/1"]
    assert get(url, written, f"lineage?sample_id={B}/0")["sample"]["first_version"] == 1


def test_lag_dead_letters_configuration_and_alarms_are_read(url: str, written: WrittenRun) -> None:
    rows = get(url, written, "lag")["rows"]
    assert sum(row["num_records"] for row in rows if row["role"] == "reward") == 6
    found = get(url, written, "dead-letters")["rows"]
    assert [(one["role"], one["error_class"]) for one in found] == [("reward", "PoisonSample")]
    assert get(url, written, "config")["config"]["run"]["max_staleness"] == 1
    assert "dead_letters" in {alarm["name"] for alarm in get(url, written, "alarms")["alarms"]}


def test_live_records_arrive(url: str, written: WrittenRun) -> None:
    before = summary(url, written)["num_samples"]
    group = "000001-0001-0"
    written.issue(group, row=9)
    written.generate(group, version=1, rewards=[0.25])
    until(lambda: summary(url, written)["num_samples"] == before + 1)
    until(lambda: get(url, written, f"samples?group={group}")["rows"][0]["reward"] == 0.25)


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/runs/none-such/summary", 400, "there is no run"),
        ("/api/runs/{run}/samples?reward=high", 400, "reward must be a number"),
        ("/api/runs/{run}/sample?row=77777", 400, "no sample in row"),
        ("/api/runs/{run}/dead-letters/reward@99", 400, "no dead letter"),
        ("/api/runbooks/..%2F..%2Fetc", 404, ""),
        ("/api/runbooks/none", 400, "no runbook"),
        ("/static/..%2Fapp.py", 404, ""),
    ],
)
def test_wrong_call_is_refused_with_its_reason(
    url: str, written: WrittenRun, path: str, status: int, text: str
) -> None:
    found = call(url, path.format(run=written.config.run.id))
    assert found[0] == status
    assert text in str(found[1])


def test_page_may_load_nothing_from_elsewhere(url: str) -> None:
    request = urllib.request.Request(url, headers=login_headers(url))
    with urllib.request.urlopen(request, timeout=30) as answer:
        policy = answer.headers["Content-Security-Policy"]
        text = answer.read().decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_other_sites_are_refused(url: str, headers: dict[str, str]) -> None:
    assert call(url, "/api/runs", headers=headers)[0] in (403, 421)


def test_change_needs_the_token_and_has_a_dry_run(url: str, written: WrittenRun) -> None:
    path = f"/api/runs/{written.config.run.id}/dead-letters"
    body = {"verb": "drop", "ids": ["reward@0"], "comment": "a test"}
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer ümlaut"}):
        quoted = {name: value.encode("ascii", "replace").decode() for name, value in given.items()}
        assert call(url, path, body=body, headers=quoted)[0] == 401
    right = {"Authorization": "Bearer secret-token"}
    status, found, _ = call(url, path, body=body, headers=right)
    assert (status, found) == (
        200,
        {"dry_run": True, "selected": ["reward@0"], "num_resolved": 0},
    )
    assert not get(url, written, "dead-letters")["rows"][0]["resolution"]
    requeue = body | {"verb": "requeue", "dry_run": False}
    status, found, _ = call(url, path, body=requeue, headers=right)
    assert status == 400
    assert "holds other bytes" in found["error"]
    scale = {"direction": "out", "num_replicas": 2}
    run = written.config.run.id
    assert call(url, f"/api/runs/{run}/scale", body=scale)[0] == 401
    assert call(url, f"/api/runs/{run}/scale", body=scale, headers=right)[0] == 409


@pytest.fixture(scope="module")
def browser(url: str, written: WrittenRun) -> Iterator[Chromium]:
    """Return a browser that has opened a link to the page."""
    link = PageAccess(written.config.run.directory).create_link(url, run_id=written.config.run.id)
    with Chromium() as opened:
        opened.open(link)
        opened.wait_for("document.getElementById('step')")
        assert "token" not in opened.run("location.search")
        yield opened


def show(browser: Chromium, url: str, run: WrittenRun, page: str, **more: str) -> None:
    """Open a page and wait until it shows the run's state."""
    query = "".join(f"&{name}={value}" for name, value in more.items())
    browser.open(f"{url}/?run={run.config.run.id}&page={page}{query}")
    browser.wait_for(
        f"document.getElementById('main')?.dataset.page === '{page}'"
        " && document.getElementById('step')"
    )


@needs_chromium
def test_hostile_sample_stays_text(browser: Chromium, url: str, written: WrittenRun) -> None:
    for page, more in (("samples", {"sample": f"{A}/0"}), ("deadletters", {"letter": "reward@0"})):
        show(browser, url, written, page, **more)
        browser.wait_for("document.getElementById('main').innerText.includes('onerror')")
        assert not browser.run("!!document.getElementById('injected')")
        assert not browser.run("!!document.querySelector('main img, main script')")
        assert browser.run("document.title") != "owned"


@needs_chromium
def test_sample_shows_which_of_its_paths_were_truncated(
    browser: Chromium, url: str, written: WrittenRun
) -> None:
    found = get(url, written, f"sample?sample_id={A}/1")
    assert (found["path_lengths"], found["truncated_paths"]) == ([3, 1], [0])
    show(browser, url, written, "samples", sample=f"{A}/1")
    browser.wait_for("document.getElementById('main').innerText.includes('3 (truncated), 1')")


@needs_chromium
@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_page_is_accessible_at_both_widths_and_in_both_languages(
    browser: Chromium, url: str, written: WrittenRun, axe: str
) -> None:
    wrong = []
    for width, dark, language in ((1400, False, "en"), (400, True, "zh")):
        browser.resize(width, dark=dark)
        views = [(page, dict[str, str]()) for page in PAGES]
        views += [("samples", {"sample": f"{A}/0"}), ("lineage", {"of": f"{B}/0"})]
        for page, more in views:
            show(browser, url, written, page, lang=language, **more)
            found = find_violations(browser, axe)
            wrong += [f"{page} {width} {language}: {one}" for one in found]
            if browser.run("document.documentElement.scrollWidth > innerWidth"):
                wrong.append(f"{page} {width}: wider than the window")
    assert wrong == []
    browser.resize(1400)


@needs_chromium
def test_page_is_used_by_keyboard_and_its_address_is_the_view(
    browser: Chromium, url: str, written: WrittenRun
) -> None:
    show(browser, url, written, "samples")
    browser.wait_for("document.querySelectorAll('tbody tr').length >= 6")
    browser.run("document.querySelector('[data-focus=sort-reward]').focus()")
    browser.press("Enter", code=13)
    browser.wait_for("location.search.includes('sort=-reward')")
    browser.wait_for(
        "document.querySelector('[aria-sort=descending] button')?.dataset.focus === 'sort-reward'"
    )
    assert browser.run("document.activeElement.dataset.focus") == "sort-reward"
    address = browser.run("location.href")
    browser.open("about:blank")
    browser.open(address)
    browser.wait_for("document.querySelector('[aria-sort=descending] button')")


@needs_chromium
def test_browser_asks_no_other_server_and_reports_no_error(
    browser: Chromium, url: str, written: WrittenRun
) -> None:
    for page in PAGES:
        show(browser, url, written, page)
    asked = {one for one in browser.requests if one.startswith(("http", "ws"))}
    assert {one for one in asked if not one.startswith(url)} == set()
    assert browser.problems == []


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return axe-core's script."""
    return fetch_axe(tmp_path_factory.mktemp("axe"))


def test_page_next_to_a_run_starts_when_someone_connects_and_ends_with_the_run(
    written: WrittenRun, tmp_path: Path
) -> None:
    run_file = tmp_path / "run.json"
    run_file.write_text(written.config.model_dump_json())
    config = written.config
    (config.run_directory / "logs").mkdir(exist_ok=True)
    addresses: list[str] = []
    with offer_page(config, run_file=run_file, show=addresses.append):
        assert servers_of(run_file) == []
        assert addresses[0].endswith(f"&run={config.run.id}")
        address = log_in(addresses[0])
        until(lambda: answers(address, written), seconds=300.0)
        low = min(psutil.Process().nice() + 10, 19)
        assert [psutil.Process(pid).nice() for pid in servers_of(run_file)] == [low]
    assert servers_of(run_file) == []
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=5)


def answers(address: str, run: WrittenRun) -> bool:
    """Return whether the page's server, which may just be starting, has read the run."""
    try:
        return bool(summary(address, run)["policy_version"] == 1)
    except (TimeoutError, urllib.error.URLError):
        return False


def servers_of(run_file: Path) -> list[int]:
    """Return the processes that serve a run file's page."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(run_file) in (process.info["cmdline"] or [])
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"broker": {"username": "someone"}},
        {"broker": {"client": {"security.protocol": "SSL"}}},
    ],
)
def test_run_offers_no_page_where_the_broker_asks_for_credentials(
    written: WrittenRun, tmp_path: Path, changes: dict[str, dict[str, Any]]
) -> None:
    config = written.config
    for section, values in changes.items():
        changed_section = getattr(config, section).model_copy(update=values)
        config = config.model_copy(update={section: changed_section})
    assert RunPage.open(config, run_file=tmp_path / "run.json") is None


@pytest.fixture(scope="module")
def report_file(written: WrittenRun, url: str) -> Path:
    """Write the run's report, and return its page."""
    report, _ = rewrite_report(written.config, on_progress=lambda *_: None)
    return write_snapshot(written.config, report)


def test_snapshot_holds_what_the_server_answers(
    url: str, written: WrittenRun, report_file: Path
) -> None:
    text = report_file.read_text()
    begin = text.index('id="snapshot">') + len('id="snapshot">')
    data = text[begin : text.index("</script>", begin)]
    assert "<" not in data
    found = json.loads(data)
    assert found["overview"] == get(url, written, "overview")
    served = get(url, written, "samples?count=50&sort=reward")["rows"]
    assert by_id(found["samples"]["rows"]) == by_id(served)
    assert found["lag"]["rows"]
    assert [one["role"] for one in found["dead-letters"]["rows"]] == ["reward"]
    trained = {row["sample_id"] for row in served if row["outcome"] == "trained"}
    assert {one["sample_id"] for one in found["details"].values()} == trained
    assert (report_file.stat().st_mode & 0o777) == 0o600


def by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows by sample; their numbers depend on the order in which the log was read."""
    return {row["sample_id"]: row | {"row": 0} for row in rows}


@needs_chromium
def test_snapshot_opens_from_the_disk_without_a_server(
    browser: Chromium, written: WrittenRun, report_file: Path, axe: str
) -> None:
    browser.resize(1400)
    browser.open("about:blank")  # an earlier test's page may still ask for something
    browser.requests.clear()
    browser.problems.clear()
    browser.open(report_file.as_uri())
    browser.wait_for("document.getElementById('main')?.dataset.page === 'result'")
    browser.wait_for("document.getElementById('verdict')")
    for page in [*PAGES[:-1], "result"]:
        browser.run(f"document.querySelector('[data-focus=nav-{page}]').click()")
        browser.wait_for(f"document.getElementById('main').dataset.page === '{page}'")
        assert not browser.run("!!document.querySelector('main .banner.bad:not(#verdict)')"), page
    assert find_violations(browser, axe) == []
    parts = browser.run(
        "[...document.querySelectorAll('#run-verdict, .top, .facts-list, th, details')]"
        ".filter((one) => !one.closest('details *')).map((one) => one.textContent)"
    )
    assert parts[0].startswith("Starting"), parts
    assert parts[1].startswith("Reward"), parts
    assert parts[2].startswith("Reward, first and last ten steps"), parts
    assert parts[-5:-1] == ["Sample", "Reward", "Prompt", "Completion"]
    assert parts[-1].startswith("All numbers"), parts
    address = f"{report_file.as_uri()}#?run={written.config.run.id}&page=samples&reward=0.5.."
    browser.open("about:blank")
    browser.open(address)
    browser.wait_for("document.getElementById('matching')")
    assert browser.run("document.querySelectorAll('tbody tr').length") == 3
    browser.open(f"{report_file.as_uri()}#?run={written.config.run.id}&page=samples&sample={B}/0")
    browser.wait_for("document.querySelector('main').innerText.includes('trained')")
    browser.open("about:blank")
    browser.open(f"{report_file.as_uri()}#?run={written.config.run.id}&page=samples&sample={A}/0")
    browser.wait_for("document.querySelector('main').innerText.includes('does not hold it')")
    asked = [one for one in browser.requests if not one.startswith(("file:", "data:", "about:"))]
    assert asked == []
    assert browser.problems == []
