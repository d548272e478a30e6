"""Renders a run's report as one HTML file that needs nothing else: no network, no scripts. All
external text is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

import orjson

from relax_events.reports.chart_scales import format_number
from relax_events.reports.charts import (
    NUM_COLOURS,
    bar_chart,
    line_chart,
    shares_bar,
    stacked_chart,
)

CURVES = {  # metric -> title, definition
    "reward_mean": ("Reward", "mean over the step's samples; strong: moving mean"),
    "loss": ("Loss", "of the whole step, as it was differentiated"),
    "preference_accuracy": (
        "Preferences",
        "share of the pairs whose chosen completion has the higher implied reward",
    ),
    "reward_margin": (
        "Margin",
        "of the policy's implied rewards, chosen minus rejected, mean over pairs",
    ),
    "kl_estimate": ("KL", "estimate against the reference policy, nats per token"),
    "teacher_kl": (
        "Distance to the teacher",
        "reverse KL of the engine's policy, estimated from the sampled tokens, nats per token",
    ),
    "distill_loss": (
        "Distillation",
        "divergence from the teacher in the loss, before its coefficient",
    ),
    "entropy": ("Entropy", "of the policy, nats per token"),
    "grad_norm": ("Gradient norm", "over all parameters, before it is cut"),
    "clip_fraction": ("Clipped tokens", "share of loss tokens whose ratio was clipped"),
    "completion_tokens_mean": ("Completion length", "mean over the step's samples, tokens"),
    "staleness_mean": ("Staleness", "mean over the step's samples, policy versions"),
    "mismatch_kl": (
        "Engine against trainer",
        "KL between their log-probabilities of the sampled tokens, nats per token",
    ),
    "effective_sample_ratio": (
        "Effective sample size",
        "of the loss tokens, weighed by trainer against engine; 1 on-policy",
    ),
    "masked_fraction": (
        "Masked tokens",
        "share of loss tokens that a correction or mask leaves without gradient",
    ),
    "value_loss": ("Value loss", "of the critic in the whole step"),
    "explained_variance": (
        "Explained variance",
        "share of the returns' variance that the critic's recorded values explain",
    ),
    "tokens_per_second": ("Throughput", "trained tokens per second, prompt and completion"),
}
TEACHER_METRICS = {"teacher_kl", "distill_loss"}
"""Drawn only where a run has a teacher: all zeros mean that it has none."""
SMOOTHED = {"reward_mean", "loss", "grad_norm", "completion_tokens_mean", "tokens_per_second"}


def render_report(report: Mapping[str, Any], *, samples: str = "") -> str:
    """Return the page of a report as `build_report` makes it; unknown values are shown as a dash.

    Args:
        report: The report.
        samples: Some samples of the run, as HTML.
    """
    parts = [
        render_header(report),
        render_tiles(report),
        render_ledger(report),
        render_charts(report),
        samples,
        render_evaluations(report),
        render_phases(report),
        render_run_file(report),
    ]
    return render_page(f"Run {report['run_id']}", "\n".join(parts))


def render_page(title: str, body: str) -> str:
    """Return a complete page; a content policy forbids it to load anything external and to run
    scripts.
    """
    style = files("relax_events.reports").joinpath("page.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta '
        'name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def render_header(report: Mapping[str, Any]) -> str:
    """Render which run it was, and how it ended."""
    verdict = (
        '<span class="verdict good">goal reached</span>'
        if report["succeeded"]
        else '<span class="verdict bad">goal not reached</span>'
    )
    machine = (
        f"{report['machine']['cores']} cores, {report['machine']['platform']}, Python "
        f"{report['machine']['python']}"
    )
    return (
        f"<header><h1>Run {escape(report['run_id'])}{verdict}</h1><p>{escape(report['reason'])}</p>"
        f'<p class="faint">ended {escape(report["ended_at"])}; {escape(machine)}</p>'
        f"<p>export the model: <code>{escape(report['export_command'])}</code></p></header>"
    )


def render_tiles(report: Mapping[str, Any]) -> str:
    """Render the key metrics."""
    outcomes = report["outcomes"]
    ends = ", ".join(
        f"{outcomes[name]:,} {name.replace('_', ' ')}"
        for name in ("filtered", "expired", "failed", "in_flight")
    )
    skipped = report["prompts_skipped"]
    reasons = (
        ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in skipped.items())
        or "no filter skipped any"
    )
    shown = [
        *learning_tiles(report),
        (
            "train steps",
            f"{report['steps']:,} of {report['num_steps']:,}",
            f"policy version {report['policy_version']}",
        ),
        ("wall time", format_duration(report["total_seconds"]), _time_text(report)),
        (
            "tokens per second",
            format_metric(report["tokens_per_second"]),
            f"{format_metric(report['samples_per_second'])} samples per second",
        ),
        (
            "prompt groups trained",
            f"{outcomes['trained']:,}",
            f"of {outcomes['issued']:,} issued; {ends}",
        ),
        ("prompts skipped", f"{sum(skipped.values()):,}", escape(reasons)),
        (
            "samples trained",
            f"{report['samples_trained']:,}",
            f"of {report['samples_rolled_out']:,} generated",
        ),
        (
            "samples lost",
            f"{report['samples_lost']:,}",
            f"{report['samples_trained_twice']:,} trained twice",
        ),
        (
            "rollouts regenerated",
            f"{report['rollouts_regenerated']:,}",
            "generated again after a fault",
        ),
        (
            "staleness",
            format_metric(report["staleness_mean"], 3),
            f"max {report['staleness_max']}, bound {report['max_staleness']} versions",
        ),
    ]
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{name}</dt><dd>{value}<small>{text}</small></dd></div>"
            for name, value, text in shown
        )
        + "</dl>"
    )


def _time_text(report: Mapping[str, Any]) -> str:
    """Return how long the train steps of this invocation took, which is the whole time unless the
    run was resumed.
    """
    trained = f"{format_duration(report['train_seconds'])} of it in train steps"
    if report["steps_of_session"] == report["steps"]:
        return trained
    return f"since it was resumed {format_duration(report['wall_seconds'])}, {trained}"


def learning_tiles(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the learning progress: by rewards, or by loss where nothing was rewarded."""
    losses = report["curves"].get("loss")
    if report["reward_first"] is None and losses:
        return [
            (
                "loss",
                f"{format_metric(losses[0], 3)} &rarr; {format_metric(losses[-1], 3)}",
                "first step, last step",
            )
        ]
    return [
        (
            "reward",
            (
                f"{format_metric(report['reward_first'], 3)} &rarr; "
                f"{format_metric(report['reward_last'], 3)}"
            ),
            "first step, last step",
        ),
        (
            "reward, 10 steps",
            (
                f"{format_metric(report['reward_first_10'], 3)} &rarr; "
                f"{format_metric(report['reward_last_10'], 3)}"
            ),
            "first ten, last ten",
        ),
    ]


def render_ledger(report: Mapping[str, Any]) -> str:
    """Render the ledger's findings, or that there are none."""
    problems = report["ledger_problems"]
    if not problems:
        text = (
            "Every issued prompt group is accounted for, no sample was trained twice or lost, "
            "and none was older than the bound."
        )
        return f'<h2>Ledger</h2><div class="card"><p>{text}</p></div>'
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return (
        f"<h2>Ledger: broken promises ({len(problems)})</h2><div "
        f'class="card"><ul>{items}</ul></div>'
    )


def render_charts(report: Mapping[str, Any]) -> str:
    """Render the curves, the staleness of all samples, and the outcomes of prompt groups."""
    curves, steps = report["curves"], report["curves"]["train_step"]
    source = report["source"] or {"run_id": "", "curves": {}}
    rendered = [
        line_chart(
            title,
            text,
            steps,
            curves[name],
            smooth=name in SMOOTHED,
            reference=source["curves"].get(name),
            reference_name=source["run_id"],
        )
        for name, (title, text) in CURVES.items()
        if (
            any(value is not None for value in curves.get(name, ()))
            or (name in curves and not steps)
        )
        and (name not in TEACHER_METRICS or any(curves[name]))
    ]
    ages = {str(age): count for age, count in enumerate(report["staleness_counts"])}
    rendered.append(
        bar_chart(
            "Staleness of all samples",
            "trained samples by how many versions they were behind",
            ages,
            axis="policy versions behind",
        )
    )
    ended = {
        name.replace("_", " "): count
        for name, count in report["outcomes"].items()
        if name != "issued"
    }
    rendered.append(
        bar_chart(
            "Prompt groups",
            f"how the {report['outcomes']['issued']:,} issued ones ended",
            ended,
            axis="outcome",
        )
    )
    return '<h2>Training</h2><div class="charts">' + "".join(rendered) + "</div>"


def render_evaluations(report: Mapping[str, Any]) -> str:
    """Render the metrics of each dataset by policy version; nothing without evaluations."""
    rendered = []
    for name in dict.fromkeys(row["dataset"] for row in report["evaluations"]):
        rows = [row for row in report["evaluations"] if row["dataset"] == name]
        versions = [row["policy_version"] for row in rows]
        rendered.append(
            line_chart(
                f"{name}: reward",
                "mean over prompts, by policy version",
                versions,
                [row["reward_mean"] for row in rows],
            )
        )
        for k in dict.fromkeys(k for row in rows for k in row["pass_at_k"]):
            passes = [row["pass_at_k"].get(k) for row in rows]
            rendered.append(
                line_chart(
                    f"{name}: pass@{k}",
                    f"chance that one of {k} samples passes, by policy version",
                    versions,
                    passes,
                )
            )
        lengths = [row["completion_tokens_mean"] for row in rows]
        rendered.append(
            line_chart(
                f"{name}: completion length",
                "mean over samples, tokens, by policy version",
                versions,
                lengths,
            )
        )
    return (
        '<h2>Evaluation</h2><div class="charts">' + "".join(rendered) + "</div>" if rendered else ""
    )


def render_phases(report: Mapping[str, Any]) -> str:
    """Render the trainer's time by phase, largest first."""
    totals = dict(sorted(report["phase_seconds"].items(), key=lambda item: -item[1]))
    layers = {name: report["curves"]["phase_seconds"][name] for name in totals}
    chart = stacked_chart(
        "Time of each step", "trainer's seconds by phase", report["curves"]["train_step"], layers
    )
    total = sum(totals.values())
    rows = "".join(
        f'<tr><td><span class="key c{index % NUM_COLOURS}"></span>{escape(name)}</td><td '
        f'class="number">{seconds:.2f}</td>'
        f'<td class="number">{seconds / total if total else 0:.1%}</td></tr>'
        for index, (name, seconds) in enumerate(totals.items())
    )
    head = '<tr><th>phase</th><th class="number">seconds</th><th class="number">share</th></tr>'
    table = f'<div class="card">{shares_bar(totals)}<table>{head}{rows}</table></div>'
    return f'<h2>Where the time went</h2><div class="charts">{chart}{table}</div>'


def render_run_file(report: Mapping[str, Any]) -> str:
    """Render the resolved run file, and the digest of the newest weights."""
    text = orjson.dumps(report["config"], option=orjson.OPT_INDENT_2).decode()
    newest = report["weights_digests"][-1] if report["weights_digests"] else "-"
    rows = "".join(
        f"<li>from version {entry['from_version']}: {escape('; '.join(entry['changes']))}</li>"
        for entry in report["config_changes"]
    )
    changed = f"<p>changed while the run went on</p><ul>{rows}</ul>" if rows else ""
    return (
        '<h2>Run file</h2><div class="card"><p>digest '
        f"{escape(report['config_digest'])}</p><p>newest weights "
        f"{escape(newest)}</p>{changed}"
        f"<details><summary>as resolved</summary><pre>{escape(text)}</pre></details></div>"
    )


def format_metric(value: float | None, digits: int = 4) -> str:
    """Format a metric with so many significant digits; a dash when it is unknown."""
    return "-" if value is None else format_number(value, digits=digits)


def format_duration(seconds: float) -> str:
    """Format a duration."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
