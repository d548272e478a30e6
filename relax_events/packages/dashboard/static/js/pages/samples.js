// All samples, filtered, sorted and paged by the server; and one sample with its tokens and its group.

import { of } from "../api.js";
import { h } from "../dom.js";
import { excerpt, number, saveCsv, time } from "../format.js";
import { address, go } from "../state.js";
import { table } from "../table.js";
import { t } from "../strings.js";
import { drawSample } from "./sample.js";

const SPANS = [["reward", "reward"], ["tokens", "length"], ["staleness", "staleness"], ["version", "version"], ["step", "train_step"]];
const CHOICES = ["outcome", "finish", "source", "worker"];
const COUNT = 50;
const TEXTS = ["prompt", "completion"];
const texts = new Map();

function filters(query, choices) {
  const apply = (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.target.closest("form")));
    go({ ...given, page: "samples", sort: query.sort }, {});
  };
  return h(
    "form",
    { class: "filters", onsubmit: apply, "aria-label": t("filters") },
    SPANS.map(([name, label]) => h("label", {}, t(label), h("input", { name, value: query[name] || "", title: t("span_hint"), placeholder: "0.5..", "data-focus": `by-${name}` }))),
    CHOICES.map((name) =>
      h("label", {}, t(name), h("select", { name, "data-focus": `by-${name}`, onchange: apply }, h("option", { value: "" }, t("all")), choices[name].map((value) => h("option", { value, selected: value === query[name] }, value)))),
    ),
    h("label", {}, t("prompt_group"), h("input", { name: "group", value: query.group || "", placeholder: "000012-0003-0", "data-focus": "by-group" })),
    h("button", { type: "submit" }, t("apply")),
    h("a", { href: address({ page: "samples" }) }, t("clear")),
  );
}

async function fillTexts(run, rows) {
  const missing = rows.filter((row) => !texts.has(`${run}/${row.row}/completion`)).map((row) => row.row);
  if (!missing.length) return;
  const found = await of(run, "texts", { rows: missing.join(",") });
  if (texts.size > 4000) texts.clear();
  for (const [row, value] of Object.entries(found)) for (const name of TEXTS) texts.set(`${run}/${row}/${name}`, excerpt(value[name]));
  for (const cell of document.querySelectorAll("[data-text]")) cell.textContent = texts.get(cell.dataset.text) ?? cell.textContent;
}

function drawText(key) {
  return h("span", { "data-text": key }, texts.get(key) ?? "…");
}

export async function draw({ run, query }) {
  if (query.sample || query.row) return drawSample(run, query);
  const first = Math.max(Number(query.first) || 0, 0);
  const sort = query.sort || "-time";
  const names = ["outcome", "finish", "source", "worker", "group", ...SPANS.map(([name]) => name)];
  const given = Object.fromEntries(names.map((name) => [name, query[name]]));
  const found = await of(run, "samples", { ...given, sort, first, count: COUNT });
  const columns = [
    { label: t("sample"), cell: (row) => h("a", { href: address({ page: "samples", row: row.row }), "data-focus": `row-${row.row}` }, row.sample_id) },
    ...TEXTS.map((name) => ({ label: t(name), text: true, cell: (row) => drawText(`${run}/${row.row}/${name}`) })),
    { label: t("reward"), number: true, sort: "reward", cell: (row) => number(row.reward) },
    { label: t("length"), number: true, sort: "tokens", cell: (row) => number(row.tokens) },
    { label: t("staleness"), number: true, sort: "staleness", cell: (row) => number(row.staleness) },
    { label: t("version"), number: true, sort: "version", cell: (row) => number(row.policy_version) },
    { label: t("train_step"), number: true, sort: "step", cell: (row) => number(row.train_step) },
    { label: t("outcome"), cell: (row) => row.outcome },
    { label: t("finish"), cell: (row) => row.finish },
    { label: t("source"), cell: (row) => row.source || "–" },
    { label: t("worker"), cell: (row) => row.worker },
    { label: t("time_column"), sort: "time", cell: (row) => time(row.at) },
  ];
  const last = Math.min(first + COUNT, found.num_matching);
  const turn = (to, label, name) => h("button", { type: "button", disabled: to < 0 || to >= found.num_matching, "data-focus": name, onclick: () => go({ first: to || "" }, { keep: true }) }, label);
  const save = () => saveCsv("samples", Object.keys(found.rows[0] || {}), found.rows.map((row) => Object.values(row)));
  setTimeout(() => fillTexts(run, found.rows).catch(() => {}), 0);
  return [
    filters(query, found.choices),
    h("p", { class: "pager" }, h("span", { id: "matching" }, t("matching", { count: number(found.num_matching), all: number(found.num_samples) })), turn(first - COUNT, t("previous"), "previous"), h("span", {}, t("page_of", { first: number(last ? first + 1 : 0), last: number(last) })), turn(first + COUNT, t("next"), "next"), h("button", { type: "button", class: "small", "data-focus": "csv", "aria-label": t("csv_of", { title: t("samples") }), onclick: save }, "CSV")),
    table({ label: t("samples"), columns, rows: found.rows, sort, onsort: (value) => go({ sort: value, first: "" }, { keep: true }) }),
  ];
}

export function isStill(query) {
  return Boolean(query.sample || query.row || query.first);
}
