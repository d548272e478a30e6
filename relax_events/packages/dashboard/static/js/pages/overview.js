// The curves of a run, and of others beside it.

import { of } from "../api.js";
import { h } from "../dom.js";
import { drawReward, plot } from "../plot.js";
import { number } from "../format.js";
import { go } from "../state.js";
import { t } from "../strings.js";
import { drawVerdict } from "../verdict.js";

const LEARNING = [["entropy", "entropy"], ["kl_estimate", "kl"], ["completion_tokens_mean", "completion_tokens"]];
const SPEED = [["tokens_per_second", "throughput"], ["samples_per_second", "samples_per_second"], ["staleness_mean", "staleness_mean"]];
const OTHERS = [
  ["loss", "loss"],
  ["grad_norm", "grad_norm"],
  ["clip_fraction", "clip_fraction"],
  ["mismatch_mean_abs", "mismatch"],
  ["mismatch_kl", "mismatch_kl"],
  ["effective_sample_ratio", "effective_sample_ratio"],
  ["masked_fraction", "masked_fraction"],
  ["preference_accuracy", "preference_accuracy"],
  ["reward_margin", "reward_margin"],
  ["value_loss", "value_loss"],
  ["explained_variance", "explained_variance"],
  ["teacher_kl", "teacher_kl"],
  ["distill_loss", "distill_loss"],
];
// Drawn only where a run has a teacher: all zeros mean that it has none.
const OF_TEACHERS = ["teacher_kl", "distill_loss"];

// Puts the curves of several runs on one axis of steps.
function joined(found, pick) {
  const steps = [...new Set(found.flatMap(([, one]) => pick(one).x))].sort((a, b) => a - b);
  const series = found.map(([name, one]) => {
    const { x, y } = pick(one);
    const by = new Map(x.map((step, at) => [step, y[at]]));
    return { label: name, values: steps.map((step) => by.get(step) ?? null) };
  });
  return { x: steps, series };
}

// pass@k of a dataset, a series for each k.
function passes(rows) {
  const ks = [...new Set(rows.flatMap((one) => Object.keys(one.pass_at_k)))];
  return ks.map((k, at) => ({ label: `pass@${k}`, values: rows.map((one) => one.pass_at_k[k] ?? null), points: true, colour: at + 1 }));
}

export async function draw({ run, query, runs, summary }) {
  const others = (query.compare || "").split(",").filter((name) => name && name !== run).slice(0, 3);
  const found = await Promise.all([run, ...others].map(async (name) => [name, await of(name, "overview")]));
  const mine = found[0][1];
  const marks = mine.marks.map((one) => one.step);
  const curve = (name, title) => {
    if (!found.some(([, one]) => one.columns[name])) return null;
    if (OF_TEACHERS.includes(name) && !found.some(([, one]) => one.columns[name]?.some(Boolean))) return null;
    return plot({ key: name, title: t(title), xLabel: t("train_step"), marks, ...joined(found, (one) => ({ x: one.steps, y: one.columns[name] || one.steps.map(() => null) })) });
  };
  const groups = (name, title) =>
    mine.groups.steps.length > 0 && plot({ key: name, title: t(title), xLabel: t("train_step"), marks, ...joined(found, (one) => ({ x: one.groups.steps, y: one.groups[name] })) });
  const spreads = Object.entries(mine.components).map(([name, one]) =>
    plot({
      key: `spread-${name}`,
      title: t("reward_spread", { name: name === "reward" ? t("reward") : name }),
      x: one.versions,
      xLabel: t("policy_version"),
      series: [
        { label: t("mean"), values: one.mean },
        { label: t("upper"), values: one.mean.map((value, at) => value + one.std[at]), quiet: true },
        { label: t("lower"), values: one.mean.map((value, at) => value - one.std[at]), quiet: true },
        { label: t("low"), values: one.min, colour: 1 },
        { label: t("high"), values: one.max, colour: 2 },
      ],
      bands: [[2, 3]],
    }),
  );
  const counts = mine.staleness_counts;
  const stale = counts.length > 0 && plot({ key: "staleness", title: t("staleness_share"), x: counts.map((_, at) => at), xLabel: t("versions_behind"), series: [{ label: t("samples_number"), values: counts, points: true }] });
  const datasets = [...new Set(mine.evaluations.map((one) => one.dataset))];
  const evaluations = datasets.map((dataset) => {
    const rows = mine.evaluations.filter((one) => one.dataset === dataset).sort((a, b) => a.policy_version - b.policy_version);
    return plot({ key: `evaluation-${dataset}`, title: `${t("evaluations")}: ${dataset}`, x: rows.map((one) => one.policy_version), xLabel: t("policy_version"), series: [{ label: t("reward"), values: rows.map((one) => one.reward_mean), points: true }, ...passes(rows)] });
  });
  const compare = h(
    "form",
    { class: "filters", onsubmit: (event) => event.preventDefault() },
    h("label", {}, t("compare_with"), h("select", { "data-focus": "compare", onchange: (event) => go({ compare: event.target.value }, { keep: true }) }, h("option", { value: "" }, t("none")), runs.filter((one) => one.run_id !== run).map((one) => h("option", { value: one.run_id, selected: others.includes(one.run_id) }, one.run_id)))),
  );
  const phases = Object.entries(mine.phases).map(([name, values]) => ({ label: t(`phase_${name}`), values }));
  const stepTime = phases.length > 0 && plot({ key: "phases", title: t("step_time"), x: mine.steps, xLabel: t("train_step"), series: phases, marks });
  const reward = others.length > 0 ? curve("reward_mean", "reward") : drawReward(mine);
  const section = (title, plots) => plots.some(Boolean) && [h("h2", {}, title), h("div", { class: "grid" }, plots.filter(Boolean))];
  return [
    summary?.verdict && drawVerdict(summary.verdict),
    compare,
    section(t("section_learning"), [reward, ...evaluations, groups("signalless", "signalless"), groups("truncated", "truncation"), ...LEARNING.map((one) => curve(...one))]),
    mine.marks.length > 0 && h("ul", { class: "quiet" }, mine.marks.map((one) => h("li", {}, `${t("train_step")} ${number(one.step)}: ${t(`mark_${one.name}`)} ${one.text}`))),
    section(t("section_speed"), [stepTime, ...SPEED.map((one) => curve(...one)), stale]),
    section(t("reward_by_component"), spreads),
    section(t("section_others"), OTHERS.map((one) => curve(...one))),
  ];
}
