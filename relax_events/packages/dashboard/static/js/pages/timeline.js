// A lane for each worker: its phases, its idle time hatched, and the versions.

import { of } from "../api.js";
import { h, svg } from "../dom.js";
import { duration, number, saveCsv, time } from "../format.js";
import { go } from "../state.js";
import { table } from "../table.js";
import { lang, t } from "../strings.js";

const WINDOWS = [30, 120, 600, 3600, 21600];
const LANE = 26;
const LEFT = 118;
const PHASES = ["wait", "decode", "forward_backward", "update", "weights", "commit", "busy", "generating", "loading"];

function hatch() {
  return svg("defs", {}, svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("line", { class: "hatch-line", x1: 0, y1: 0, x2: 0, y2: 6, "stroke-width": 2 })));
}

function named(phase) {
  return PHASES.includes(phase) ? phase : "other";
}

function label(span) {
  const parts = [t(`phase_${span.phase}`), duration((span.stop - span.start) / 1000)];
  if (span.step !== undefined) parts.push(`${t("step")} ${span.step}`);
  if (span.busy < 1 && span.phase !== "wait") parts.push(`${t("idle")} ${duration(span.idle_seconds)}`);
  return parts.join(", ");
}

function bars(span, place, y) {
  const x = place(span.start);
  const width = Math.max(place(span.stop) - x, 0.6);
  const title = svg("title", {}, label(span));
  if (span.phase === "wait") return svg("rect", { x, y, width, height: LANE - 8, class: "wait" }, title);
  if (span.step !== undefined) return svg("rect", { x, y, width, height: LANE - 8, class: named(span.phase) }, title);
  const busy = width * span.busy;
  const loading = width * (span.loading || 0);
  return svg(
    "g",
    {},
    title,
    svg("rect", { x, y, width: busy, height: LANE - 8, class: named(span.phase) }),
    loading > 0.2 && svg("rect", { x: x + busy, y, width: loading, height: LANE - 8, class: "loading" }),
    svg("rect", { x: x + busy + loading, y, width: Math.max(width - busy - loading, 0), height: LANE - 8, class: "idle" }),
  );
}

function lanes(found, width) {
  const place = (at) => LEFT + ((Math.max(at, found.start) - found.start) / (found.stop - found.start || 1)) * (width - LEFT - 6);
  const height = (found.lanes.length + 1) * LANE + 26;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => found.start + part * (found.stop - found.start));
  const rows = found.lanes.map((lane, at) => svg("g", {}, svg("text", { x: 0, y: at * LANE + 17 }, lane.worker), lane.spans.map((span) => bars(span, place, at * LANE + 4))));
  const last = found.lanes.length * LANE;
  return svg(
    "svg",
    { class: "lanes", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": t("timeline") },
    hatch(),
    ticks.map((at) => svg("line", { class: "axis", x1: place(at), x2: place(at), y1: 0, y2: height - 22 })),
    rows,
    svg("text", { x: 0, y: last + 17 }, t("weights_lane")),
    found.versions.map((one) => svg("line", { class: "tick", x1: place(one.at), x2: place(one.at), y1: last + 3, y2: last + LANE - 4 }, svg("title", {}, `${t("version")} ${one.version}, ${time(one.at)}`))),
    ticks.map((at, index) => (width < 600 && index % 2 ? null : svg("text", { x: place(at), y: height - 5, "text-anchor": index === 0 ? "start" : index === 4 ? "end" : "middle" }, new Date(at).toLocaleTimeString(lang(), { hourCycle: "h23" })))),
  );
}

function key(phase) {
  return h("span", {}, svg("svg", { class: "lanes", viewBox: "0 0 14 14" }, svg("rect", { width: 14, height: 14, class: phase })), phase === "idle" ? t("idle") : t(`phase_${phase}`));
}

export async function draw({ run, query }) {
  const seconds = WINDOWS.includes(Number(query.seconds)) ? Number(query.seconds) : 120;
  const found = await of(run, "timeline", { seconds });
  const width = Math.max(document.getElementById("main").clientWidth - 60, 320);
  const rows = Object.entries(found.idle_seconds);
  const save = () =>
    saveCsv(
      "timeline",
      ["worker", "start_ms", "stop_ms", "phase", "busy_ratio", "idle_seconds", "cause"],
      found.lanes.flatMap((lane) => lane.spans.map((span) => [lane.worker, span.start, span.stop, span.phase, span.busy, span.idle_seconds, span.cause])),
    );
  return [
    h("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, h("label", {}, t("window"), h("select", { "data-focus": "window", onchange: (event) => go({ seconds: event.target.value }, { keep: true }) }, WINDOWS.map((one) => h("option", { value: one, selected: one === seconds }, duration(one))))), h("button", { type: "button", class: "small", "data-focus": "csv", "aria-label": t("csv_of", { title: t("timeline") }), onclick: save }, "CSV")),
    h("div", { class: "panel" }, lanes(found, width)),
    h("div", { class: "legend-row" }, ["decode", "forward_backward", "update", "weights", "commit", "generating", "idle"].map(key)),
    h("h2", {}, t("idle_by_cause")),
    table({ label: t("idle_by_cause"), columns: [{ label: t("cause"), cell: ([cause]) => t(`cause_${cause}`) }, { label: t("time_column"), number: true, cell: ([, value]) => duration(value) }, { label: "%", number: true, cell: ([, value]) => number((100 * value) / (rows.reduce((sum, [, one]) => sum + one, 0) || 1), 2) }], rows }),
  ];
}
