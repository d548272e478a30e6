"""A judge that is shown the images of a prompt: a tiny model on a real engine, files in a store."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from event_samples import rolled_out

from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.events.types import SampleScored
from relax_events.media.library import MediaLibrary
from relax_events.rewards.run_judge import load_judge_rewards
from relax_events.roles.judging import open_judge
from relax_events.telemetry.metrics import WorkerMetrics
from tests.unit.image_model import build_image_model, image_item, image_run
from workers.judge import JudgeScorer

ENGINE = {"max_context_tokens": 1024, "sampling": {"max_new_tokens": 12, "top_k": 1}}


def judged_run(folder: Path, **judge: Any) -> Any:
    options = {"template": "$completion?"}
    judge = {
        "model_path": build_image_model(),
        "device": "cpu",
        "on_parse_error": "zero",
        "engine": ENGINE,
    } | judge
    return image_run(folder, reward={"function": "genrm", "options": options}, judge=judge)


def judge_responses(config: Any, images: list[MediaRef]) -> list[str]:
    """Let the judge score one completion about each image; return what it says."""
    engine = SimpleNamespace(count_seconds=lambda activity, seconds: None)
    worker: Any = SimpleNamespace(
        config=config,
        metrics=SimpleNamespace(
            count_tokens=lambda count: None, count_scored=lambda outcome: None, engine=engine
        ),
        records=SimpleNamespace(build_for_sample=lambda topic, event, **_: event),
        lifecycle=SimpleNamespace(on_heartbeat=lambda call: None),
        heartbeat=SimpleNamespace(add_metrics_source=lambda source: None),
    )
    opened = open_judge(config, metrics=WorkerMetrics("judge").routing)
    scorer = JudgeScorer(worker, opened, load_judge_rewards(config))
    for index, image in enumerate(images):
        shown = ContentPart(Modality.IMAGE, media=image)
        message = ChatMessage("user", [shown, ContentPart(Modality.TEXT, "What is it?")])
        scorer.submit(("rollout.samples", 0, index), rolled_out(index=index, messages=[message]))
    scored: dict[str, SampleScored] = {}
    while len(scored) < len(images):
        for _, events in scorer.poll(timeout_seconds=1.0):
            scored |= {event.sample_id: event for event in events}  # type: ignore[attr-defined]
    opened.close()
    found = [scored[name] for name in sorted(scored)]
    assert [event.error for event in found] == [None] * len(images)
    return [event.judge_response for event in found]


def test_judge_with_media_sees_each_image_and_without_sees_none(tmp_path: Path) -> None:
    config = judged_run(tmp_path, media={})
    library = MediaLibrary(config)
    same, other = (library.add(image_item(64, 48, seed=seed)) for seed in (0, 1))
    first, second, third = judge_responses(config, [same, other, same])
    assert first == third
    assert first != second
    blind = judge_responses(judged_run(tmp_path), [same, other])
    assert blind[0] == blind[1]
