// From a prompt to the version that it trained, and from a version back to its prompts.

import { of } from "../api.js";
import { h } from "../dom.js";
import { number, time } from "../format.js";
import { address, go } from "../state.js";
import { facts, table } from "../table.js";
import { t } from "../strings.js";

function search(value) {
  return h(
    "form",
    { class: "filters", onsubmit: (event) => { event.preventDefault(); go({ page: "lineage", of: event.target.elements.of.value.trim() }); } },
    h("label", {}, t("sample_or_version"), h("input", { name: "of", value, placeholder: "000012-0003-0/5", "data-focus": "of" })),
    h("button", { type: "submit" }, t("show")),
  );
}

function fact(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value, 4);
  return Array.isArray(value) ? value.join(", ") : String(value);
}

function stages(found) {
  return [
    h("h2", {}, t("stages")),
    h(
      "ol",
      { class: "stages" },
      found.stages.map((stage) =>
        h("li", {}, h("b", {}, t(`stage_${stage.what}`)), " ", h("span", { class: "quiet" }, `${time(stage.at / 1000)} · ${stage.position}`), facts(Object.entries(stage.facts).map(([name, value]) => [name.replaceAll("_", " "), fact(value)]))),
      ),
    ),
    h("p", {}, found.first_version === null ? t("not_trained") : [t("trained_in", { version: found.first_version }), " ", h("a", { href: address({ page: "lineage", of: found.first_version }) }, `${t("policy_version")} ${found.first_version}`)]),
  ];
}

function version(found, newest) {
  const link = (value, label) => value >= 0 && value <= newest && h("a", { href: address({ page: "lineage", of: value }) }, label);
  const columns = [
    { label: t("sample"), cell: (row) => h("a", { href: address({ page: "lineage", of: row.sample_id }) }, row.sample_id) },
    { label: t("version"), number: true, cell: (row) => number(row.policy_version) },
    { label: t("data_row"), number: true, cell: (row) => number(row.data_row) },
    { label: t("reward"), number: true, cell: (row) => number(row.reward) },
    { label: t("advantage"), number: true, cell: (row) => number(row.advantage) },
  ];
  return [
    h("p", {}, found.train_step === null ? t("initial_version", { version: found.policy_version }) : t("made_by", { version: found.policy_version, step: found.train_step, count: found.num_samples })),
    h("p", { class: "pager" }, link(found.policy_version - 1, t("older_version")), link(found.policy_version + 1, t("newer_version"))),
    facts([[t("time_column"), time((found.committed_at ?? found.published_at) / 1000)], [t("artifact"), found.artifact], [t("digest"), found.weights_digest], [t("reward"), found.rewards.map((one) => `${one.reward_name}: ${number(one.mean_reward)} (${number(one.num_samples)})`).join(", ")]]),
    table({ label: t("samples"), columns, rows: found.samples }),
  ];
}

export async function draw({ run, query }) {
  const wanted = query.of || "";
  if (wanted.includes("/")) return [search(wanted), ...stages((await of(run, "lineage", { sample_id: wanted })).sample)];
  const found = await of(run, "lineage", { version: wanted });
  return [search(wanted), ...version(found.version, found.newest)];
}

export function isStill(query) {
  return Boolean(query.of);
}
