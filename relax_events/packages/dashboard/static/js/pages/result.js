// How a run ended, in numbers: what report.json has besides the curves.

import { h } from "../dom.js";
import { duration, number, percent } from "../format.js";
import { snapshot } from "../snapshot.js";
import { facts, table } from "../table.js";
import { t } from "../strings.js";
import { drawVerdict } from "../verdict.js";

function pair(first, last) {
  return first === null || first === undefined ? null : `${number(first)} → ${number(last)}`;
}

function counts(found) {
  return Object.entries(found).map(([name, count]) => `${name.replaceAll("_", " ")} ${number(count)}`).join(", ") || "–";
}

export async function draw() {
  const report = snapshot.report;
  const phases = Object.entries(report.phase_seconds).sort((a, b) => b[1] - a[1]);
  const total = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  const problems = report.ledger_problems;
  return [
    drawVerdict(report.verdict),
    h("div", { class: report.succeeded ? "banner good" : "banner bad", id: "verdict" }, `${t(report.succeeded ? "goal_reached" : "goal_missed")}: ${report.reason}`),
    problems.length > 0 ? h("div", { class: "banner bad" }, t("promises_broken"), h("ul", {}, problems.map((one) => h("li", {}, one)))) : h("p", { id: "ledger" }, t("ledger_balances")),
    facts([
      [t("reward"), pair(report.reward_first, report.reward_last)],
      [t("reward_10"), pair(report.reward_first_10, report.reward_last_10)],
      [t("train_step"), `${number(report.steps)}/${number(report.num_steps)}`],
      [t("policy_version"), number(report.policy_version)],
      [t("wall_time"), duration(report.total_seconds)],
      [t("throughput"), number(report.tokens_per_second)],
      [t("samples_per_second"), number(report.samples_per_second)],
      [t("prompt_group"), counts(report.outcomes)],
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
      [t("export_command"), h("code", {}, report.export_command)],
      [t("config_digest"), h("code", {}, report.config_digest)],
      [t("machine"), `${report.machine.cores} × CPU, ${report.machine.platform}, Python ${report.machine.python}`],
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
  ];
}
