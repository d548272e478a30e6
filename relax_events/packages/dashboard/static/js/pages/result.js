// A run's end on one page, to be mailed: verdict, curve, evaluations, cost and samples; then all numbers.

import { of } from "../api.js";
import { h } from "../dom.js";
import { duration, excerpt, number, percent } from "../format.js";
import { drawReward } from "../plot.js";
import { snapshot } from "../snapshot.js";
import { address } from "../state.js";
import { facts, table } from "../table.js";
import { t } from "../strings.js";
import { drawVerdict } from "../verdict.js";

function pair(first, last) {
  return first === null || first === undefined ? null : `${number(first)} → ${number(last)}`;
}

function counts(found) {
  return Object.entries(found).map(([name, count]) => `${name.replaceAll("_", " ")} ${number(count)}`).join(", ") || "–";
}

function drawEvaluations(rows) {
  const datasets = [...new Set(rows.map((one) => one.dataset))];
  const ends = datasets.map((dataset) => {
    const own = rows.filter((one) => one.dataset === dataset).sort((a, b) => a.policy_version - b.policy_version);
    return { dataset, first: own[0], last: own[own.length - 1] };
  });
  const columns = [
    { label: t("dataset"), cell: (one) => one.dataset },
    { label: t("policy_version"), number: true, cell: (one) => pair(one.first.policy_version, one.last.policy_version) },
    { label: t("reward"), number: true, cell: (one) => pair(one.first.reward_mean, one.last.reward_mean) },
    { label: "pass@k", cell: (one) => Object.keys(one.last.pass_at_k).map((k) => `${k}: ${pair(one.first.pass_at_k[k], one.last.pass_at_k[k]) ?? number(one.last.pass_at_k[k])}`).join(", ") },
  ];
  return ends.length > 0 && [h("h2", {}, t("evaluations")), table({ label: t("evaluations"), columns, rows: ends })];
}

// The samples of the newest train step with the highest, the middle and the lowest reward.
function drawSamples() {
  const trained = snapshot.samples.rows.filter((row) => row.outcome === "trained" && row.reward !== null && row.row in snapshot.texts && row.row in snapshot.details);
  const newest = Math.max(...trained.map((row) => row.train_step));
  const rows = trained.filter((row) => row.train_step === newest).sort((a, b) => b.reward - a.reward);
  const picked = [...new Set([rows[0], rows[rows.length >> 1], rows[rows.length - 1]])].filter(Boolean);
  const text = (row, name) => excerpt(snapshot.texts[row.row][name]);
  const columns = [
    { label: t("sample"), cell: (row) => h("a", { href: address({ page: "samples", row: row.row }) }, row.sample_id) },
    { label: t("reward"), number: true, cell: (row) => number(row.reward) },
    { label: t("prompt"), text: true, cell: (row) => text(row, "prompt") },
    { label: t("completion"), text: true, cell: (row) => text(row, "completion") },
  ];
  const title = t("samples_of_step", { step: number(newest) });
  return picked.length > 0 && [h("h2", {}, title), table({ label: title, columns, rows: picked })];
}

function drawNumbers(report) {
  const phases = Object.entries(report.phase_seconds).sort((a, b) => b[1] - a[1]);
  const total = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  return h(
    "details",
    {},
    h("summary", {}, t("all_numbers")),
    facts([
      [t("reward"), pair(report.reward_first, report.reward_last)],
      [t("train_step"), `${number(report.steps)}/${number(report.num_steps)}`],
      [t("policy_version"), number(report.policy_version)],
      [t("samples_per_second"), number(report.samples_per_second)],
      [t("prompt_groups"), counts(report.outcomes)],
      [t("prompt_groups_too_large"), number(report.prompt_groups_too_large)],
      [t("prompts_skipped"), counts(report.prompts_skipped)],
      [t("samples_generated"), number(report.samples_rolled_out)],
      [t("samples_trained"), number(report.samples_trained)],
      [t("samples_lost"), number(report.samples_lost)],
      [t("samples_twice"), number(report.samples_trained_twice)],
      [t("samples_again"), number(report.rollouts_regenerated)],
      [t("issued_twice"), number(report.prompt_groups_issued_twice)],
      [t("updates_held"), number(report.updates_held)],
      [t("staleness"), `${number(report.staleness_mean)}, ${t("high")} ${number(report.staleness_max)} / ${number(report.max_staleness)}`],
      [t("config_digest"), h("code", {}, report.config_digest)],
    ]),
    h("h2", {}, t("time_by_phase")),
    table({
      label: t("time_by_phase"),
      columns: [
        { label: t("phase"), cell: ([name]) => t(`phase_${name}`) },
        { label: t("seconds_column"), number: true, cell: ([, seconds]) => number(seconds) },
        { label: t("share"), number: true, cell: ([, seconds]) => percent(total ? seconds / total : 0) },
      ],
      rows: phases,
    }),
    report.config_changes.length > 0 && [h("h2", {}, t("config_changed")), h("ul", {}, report.config_changes.map((one) => h("li", {}, `${t("version")} ${one.from_version}: ${one.changes.join("; ")}`)))],
  );
}

export async function draw({ run }) {
  const report = snapshot.report;
  const overview = await of(run, "overview");
  const problems = report.ledger_problems;
  return [
    drawVerdict(report.verdict),
    h("div", { class: report.succeeded ? "banner good" : "banner bad", id: "verdict" }, `${t(report.succeeded ? "goal_reached" : "goal_missed")}: ${report.reason}`),
    problems.length > 0 && h("div", { class: "banner bad" }, t("promises_broken"), h("ul", {}, problems.map((one) => h("li", {}, one)))),
    drawReward(overview),
    facts([
      [t("reward_10"), pair(report.reward_first_10, report.reward_last_10)],
      [t("wall_time"), duration(report.total_seconds)],
      [t("tokens_trained"), number(report.tokens_trained)],
      [t("throughput"), number(report.tokens_per_second)],
      [t("machine"), `${report.machine.cores} × CPU, ${report.machine.platform}, Python ${report.machine.python}`],
      [t("export_command"), h("code", {}, report.export_command)],
    ]),
    drawEvaluations(overview.evaluations),
    drawSamples(),
    problems.length === 0 && h("p", { id: "ledger" }, t("ledger_balances")),
    drawNumbers(report),
  ];
}
