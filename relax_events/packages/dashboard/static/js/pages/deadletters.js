// Records that a role could not process: why, what they hold, and what to do with them.

import { keptToken, of, post } from "../api.js";
import { h } from "../dom.js";
import { number, time } from "../format.js";
import { address } from "../state.js";
import { facts, table } from "../table.js";
import { t } from "../strings.js";
import { tokenField } from "./fleet.js";

const chosen = new Set();
let said = [];

async function resolve(run, verb, comment, says) {
  if (!keptToken()) return says(h("p", { class: "warn" }, t("token_needed")));
  const call = (dry_run) => post(run, "dead-letters", { verb, ids: [...chosen], comment, dry_run }, keptToken());
  const fail = (error) => says(h("p", { class: "bad" }, error.message));
  try {
    const plan = await call(true);
    const done = (result) => {
      chosen.clear();
      says(h("p", { class: "good" }, t("resolved", { count: result.num_resolved })));
    };
    says(
      h("p", {}, t("would", { text: t("would_resolve", { verb: t(verb), ids: plan.selected.join(", ") || t("none") }) })),
      plan.selected.length > 0 && h("button", { type: "button", class: "danger", onclick: () => call(false).then(done, fail) }, t("do_it")),
    );
  } catch (error) {
    fail(error);
  }
  return undefined;
}

async function one(run, id) {
  const found = await of(run, `dead-letters/${encodeURIComponent(id)}`);
  return [
    h("p", {}, h("a", { href: address({ page: "deadletters" }) }, t("back"))),
    facts([["ID", id], [t("reason"), found.error_class], [t("origin"), `${found.origin_topic}[${found.origin_partition}]@${found.origin_offset}`], [t("worker"), found.worker_id], [t("time_column"), time(found.written_at)], [t("resolution"), found.resolution]]),
    h("pre", { class: "said" }, found.error_text),
    h("h2", {}, `${t("content")}: ${found.holds}`),
    h("pre", { class: "said" }, Object.keys(found.fields).length ? JSON.stringify(found.fields, null, 2) : found.decoding_error || found.head_hex),
  ];
}

export async function draw({ run, query }) {
  if (query.letter) return one(run, query.letter);
  const { rows } = await of(run, "dead-letters");
  const out = h("div", { role: "status" }, said);
  const says = (...content) => {
    said = content.filter(Boolean);
    out.replaceChildren(...said);
  };
  const columns = [
    { label: t("choose"), cell: (row) => (row.resolution ? "" : h("input", { type: "checkbox", "aria-label": row.id, "data-focus": `pick-${row.id}`, checked: chosen.has(row.id), onchange: (event) => (event.target.checked ? chosen.add(row.id) : chosen.delete(row.id)) })) },
    { label: "ID", cell: (row) => h("a", { href: address({ page: "deadletters", letter: row.id }) }, row.id) },
    { label: t("time_column"), cell: (row) => time(row.written_at) },
    { label: t("reason"), text: true, cell: (row) => [h("b", {}, row.error_class), ` ${row.error_text.slice(0, 300)}`] },
    { label: t("origin"), cell: (row) => row.origin },
    { label: "B", number: true, cell: (row) => number(row.num_bytes) },
    { label: t("resolution"), cell: (row) => (row.resolution ? `${row.resolution} ${row.resolution_reason}` : h("span", { class: "warn" }, t("open"))) },
  ];
  const comment = h("input", { name: "comment", "data-focus": "comment" });
  return [
    table({ label: t("deadletters"), columns, rows }),
    rows.some((row) => !row.resolution) && [
      h("h2", {}, t("change")),
      h(
        "form",
        { class: "filters", onsubmit: (event) => event.preventDefault() },
        tokenField(),
        h("label", {}, t("comment"), comment),
        h("button", { type: "button", onclick: () => resolve(run, "requeue", "", says) }, `${t("requeue")}: ${t("dry_run")}`),
        h("button", { type: "button", onclick: () => resolve(run, "drop", comment.value, says) }, `${t("drop")}: ${t("dry_run")}`),
      ),
    ],
    out,
  ];
}

export function isStill(query) {
  return Boolean(query.letter);
}
