// One sample: conversation, score, tokens coloured by a value, media, and its prompt group.

import { mediumAddress, of } from "../api.js";
import { h } from "../dom.js";
import { excerpt, number, time } from "../format.js";
import { address, go } from "../state.js";
import { facts } from "../table.js";
import { t } from "../strings.js";

const COLOURS = ["mask", "rollout_logprob", "actor_logprob", "difference", "advantage", "segment"];
const AT = { mask: 2, rollout_logprob: 3, actor_logprob: 4, ref_logprob: 5, advantage: 6, segment: 7 };

function valueOf(row, by) {
  if (by === "difference") return row[3] === null || row[4] === null ? null : row[4] - row[3];
  return row[AT[by]];
}

function shade(value, by, scale, versions) {
  if (value === null || value === undefined) return "";
  if (by === "mask") return value ? "rgba(var(--high), .22)" : "";
  if (by === "segment") return `rgba(var(${versions.indexOf(value) % 2 ? "--low" : "--high"}), .22)`;
  const part = Math.min(Math.abs(value) / (scale || 1), 1);
  return `rgba(var(${value < 0 ? "--low" : "--high"}), ${(0.04 + 0.24 * part).toFixed(3)})`;
}

function describe(row, at) {
  return facts([
    [`${t("tokens")} ${at}`, `${row[0]} ${JSON.stringify(row[1])}`],
    [t("mask"), row[2] ? t("trained") : "0"],
    [t("rollout_logprob"), row[3] === null ? null : number(row[3], 4)],
    [t("actor_logprob"), row[4] === null ? null : number(row[4], 4)],
    [t("ref_logprob"), row[5] === null ? null : number(row[5], 4)],
    [t("advantage"), row[6] === null ? null : number(row[6], 4)],
    [t("segment"), row[7] === null ? null : number(row[7])],
  ]);
}

function tokens(found, query) {
  const rows = found.tokens_table;
  if (!rows.length) return [h("p", { class: "warn" }, found.tokens_problem)];
  const by = COLOURS.includes(query.by) ? query.by : "rollout_logprob";
  const values = rows.map((row) => (by !== "mask" && by !== "segment" && !row[2] ? null : valueOf(row, by)));
  const scale = Math.max(...values.map((value) => Math.abs(value ?? 0)));
  const versions = [...new Set(values)];
  const spans = rows.map((row, at) => {
    const span = h("span", { class: at < found.num_prompt_tokens ? "prompt" : null }, row[1]);
    const ground = shade(values[at], by, scale, versions);
    if (ground) span.style.background = ground;
    return span;
  });
  const out = h("div", { role: "status" }, h("p", { class: "quiet" }, t("token_hint")));
  let here = -1;
  const move = (to) => {
    spans[here]?.classList.remove("is-here");
    here = Math.min(Math.max(to, 0), spans.length - 1);
    spans[here].classList.add("is-here");
    spans[here].scrollIntoView({ block: "nearest" });
    out.replaceChildren(describe(rows[here], here));
  };
  const keys = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
  const box = h(
    "div",
    {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label": t("tokens"),
      onkeydown: (event) => {
        if (!(event.key in keys)) return;
        event.preventDefault();
        move(here < 0 ? found.num_prompt_tokens : here + keys[event.key]);
      },
      onclick: (event) => {
        const at = spans.indexOf(event.target);
        if (at >= 0) move(at);
      },
    },
    spans.map((span, at) => (found.path_lengths.length && (at === 0 || rows[at][8] !== rows[at - 1][8]) ? [h("p", { class: "quiet" }, t(found.truncated_paths.includes(rows[at][8]) ? "path_truncated" : "path", { number: rows[at][8] + 1, all: found.path_lengths.length })), span] : span)),
  );
  return [
    h("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, h("label", {}, t("colour_by"), h("select", { "data-focus": "by", onchange: (event) => go({ by: event.target.value }, { keep: true }) }, COLOURS.map((name) => h("option", { value: name, selected: name === by }, t(name)))))),
    rows.length < found.num_tokens && h("p", { class: "quiet" }, t("tokens_cut", { shown: number(rows.length), all: number(found.num_tokens) })),
    box,
    out,
  ];
}

function media(run, found) {
  if (!found.media.length) return [];
  const address_of = (number) => mediumAddress(run, { row: found.row, number });
  return [
    h("h2", {}, t("media")),
    found.media.map((one, at) => [
      one.type.startsWith("audio") ? h("audio", { controls: true, src: address_of(at), "aria-label": t("medium", { number: at + 1 }) }) : h("img", { class: "medium", src: address_of(at), alt: t("medium", { number: at + 1 }) }),
      h("p", { class: "quiet" }, `${one.type} ${one.extent} ${number(one.num_bytes)} B`),
    ]),
  ];
}

async function group(run, found) {
  const rows = found.group;
  if (rows.length < 2) return [];
  const texts = await of(run, "texts", { rows: rows.map((row) => row.row).join(",") });
  return [
    h("h2", {}, t("group_side")),
    h(
      "div",
      { class: "cards" },
      rows.map((row) =>
        h("div", { class: row.row === found.row ? "card is-chosen" : "card" }, h("h3", {}, h("a", { href: address({ page: "samples", row: row.row }) }, row.sample_id)), h("p", { class: "quiet" }, `${t("reward")} ${number(row.reward)} · ${number(row.tokens)} ${t("tokens")} · ${row.finish}`), h("div", { class: "said", tabindex: "0", role: "group", "aria-label": row.sample_id }, excerpt(texts[row.row]?.completion ?? "–", 600))),
      ),
    ),
  ];
}

export async function drawSample(run, query) {
  const found = await of(run, "sample", query.sample ? { sample_id: query.sample } : { row: query.row });
  const score = found.score;
  const said = [...found.messages, ...(found.turns.length ? found.turns : [{ role: "assistant", text: found.completion }])];
  return [
    h("p", { class: "pager" }, h("a", { href: address({ page: "samples" }) }, t("back")), h("a", { href: address({ page: "lineage", of: found.sample_id }) }, t("lineage")), h("a", { href: address({ page: "samples", group: found.prompt_group_id }) }, t("prompt_group"))),
    h("h2", {}, `${t("sample")} ${found.sample_id}`),
    facts([
      [t("reward"), number(found.reward)],
      [t("outcome"), found.outcome],
      [t("train_step"), number(found.train_step)],
      [t("version"), found.segments.map((one) => `${one.policy_version} (${one.num_tokens})`).join(", ")],
      [t("staleness"), number(found.staleness)],
      [t("length"), number(found.tokens)],
      [t("finish"), found.finish],
      [t("paths"), found.path_lengths.map((length, at) => (found.truncated_paths.includes(at) ? `${number(length)} (${t("truncated")})` : number(length))).join(", ")],
      [t("worker"), found.worker],
      [t("time_column"), time(found.at)],
      [t("answer"), found.answer],
    ]),
    score && [h("h2", {}, t("score")), facts([[t("reward"), number(score.reward)], ...Object.entries(score.components).map(([name, value]) => [name, number(value)]), [t("reason"), score.error], [t("judge"), score.judge_response], ["", score.name]])],
    h("h2", {}, t("conversation")),
    said.map((one) => [h("h3", {}, one.role), h("div", { class: "said", tabindex: "0", role: "group", "aria-label": one.role }, one.text)]),
    media(run, found),
    h("h2", {}, t("tokens")),
    tokens(found, query),
    await group(run, found),
    found.metadata.length > 2 && [h("h2", {}, t("metadata")), h("div", { class: "said", tabindex: "0", role: "group", "aria-label": t("metadata") }, found.metadata)],
  ];
}
