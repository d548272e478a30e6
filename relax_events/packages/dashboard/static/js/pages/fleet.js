// The workers of a run, and scaling them: a dry run first, then the change, both with the token.

import { keptToken, of, post } from "../api.js";
import { h } from "../dom.js";
import { duration, number, percent, time } from "../format.js";
import { table } from "../table.js";
import { t } from "../strings.js";

const ELASTIC = ["default", "reward", "judge", "reference", "actor-forward", "teacher"];
let shown = null;

export function tokenField() {
  return h("label", {}, t("token"), h("input", { type: "password", autocomplete: "off", value: keptToken(), "data-focus": "token", oninput: (event) => keptToken(event.target.value.trim()) }));
}

async function change(run, form, says) {
  const body = { direction: form.direction.value, role: form.role.value, num_replicas: Number(form.count.value) };
  const call = (more) => post(run, "scale", { ...body, ...more }, keptToken());
  const fail = (error) => says(h("p", { class: "bad" }, error.message));
  if (!keptToken()) return says(h("p", { class: "warn" }, t("token_needed")));
  try {
    const plan = await call({ dry_run: true });
    const key = crypto.randomUUID();
    const run_it = h("button", { type: "button", class: "danger", onclick: () => call({ dry_run: false, key }).then((done) => says(h("p", { class: "good" }, `${done.status}: ${done.message}`)), fail) }, t("do_it"));
    says(h("p", {}, t("would", { text: `${plan.status}: ${plan.message} ${(plan.selected_engines || []).join(" ")}` })), run_it);
  } catch (error) {
    fail(error);
  }
  return undefined;
}

function changes(run) {
  const out = h("div", { role: "status" }, shown || "");
  const says = (...content) => {
    shown = content;
    out.replaceChildren(...content);
  };
  const form = h(
    "form",
    { class: "filters", onsubmit: (event) => { event.preventDefault(); change(run, event.target.elements, says); } },
    h("label", {}, t("direction"), h("select", { name: "direction" }, h("option", { value: "out" }, t("scale_out")), h("option", { value: "in" }, t("scale_in")))),
    h("label", {}, t("role"), h("select", { name: "role" }, ELASTIC.map((name) => h("option", { value: name }, name === "default" ? "rollout" : name)))),
    h("label", {}, t("workers_in_all"), h("input", { name: "count", type: "number", min: "0", max: "10000", value: "2", required: true })),
    tokenField(),
    h("button", { type: "submit" }, t("dry_run")),
  );
  return [h("h2", {}, t("change")), form, out];
}

export async function draw({ run }) {
  const { workers, is_running } = await of(run, "fleet");
  const kind = (row) => (!row.is_healthy ? "bad" : row.state === "working" ? "good" : "quiet");
  const engine = (row) => {
    const values = row.engine;
    if (!("capacity_samples" in values)) return "";
    return `${number(values.decoding_samples)}/${number(values.capacity_samples)}, ${number(Math.round(values.tokens_per_second || 0))} ${t("tokens_s")}, ${t("phase_generating")} ${percent(values.generating_ratio)}`;
  };
  const columns = [
    { label: t("worker"), cell: (row) => h("b", {}, row.worker_id) },
    { label: t("state"), cell: (row) => [h("span", { class: kind(row) }, row.state), row.activity ? ` ${row.activity}` : ""] },
    { label: t("version"), number: true, cell: (row) => number(row.policy_version) },
    { label: t("processed"), number: true, cell: (row) => number(row.num_processed) },
    { label: t("per_second"), number: true, cell: (row) => number(row.records_per_second) },
    { label: t("in_work"), number: true, cell: (row) => number(row.num_in_flight) },
    { label: t("heartbeat"), cell: (row) => (row.heartbeat_at ? (is_running ? duration(row.heartbeat_age_seconds) : time(row.heartbeat_at)) : "–") },
    { label: t("device"), cell: (row) => (row.host ? `${row.host} · ${row.pid}` : "–") },
    { label: t("restarts"), number: true, cell: (row) => number(row.num_restarts) },
    { label: t("engine"), cell: engine },
  ];
  return [table({ label: t("fleet"), columns, rows: workers }), ...changes(run)];
}
