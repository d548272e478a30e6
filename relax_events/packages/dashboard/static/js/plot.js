// A plot: title, values under the cursor, its data as CSV. A plot of the same key is kept and updated.

import uPlot from "../vendor/uPlot.esm.js";
import { colour, h } from "./dom.js";
import { number, saveCsv } from "./format.js";
import { t } from "./strings.js";

const kept = new Map();
const COLOURS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7"];

function options(entry, width) {
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, font: "12px system-ui" };
  return {
    width,
    height: 190,
    legend: { show: false },
    cursor: { y: false },
    scales: { x: { time: false } },
    axes: [axis, { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => number(tick)) }],
    series: [
      {},
      ...entry.series.map((one, at) => ({
        label: one.label,
        stroke: one.quiet ? "transparent" : colour(COLOURS[(one.colour ?? at) % COLOURS.length]),
        width: one.quiet ? 0 : 1.8,
        points: { show: one.points || undefined, size: 5 },
        spanGaps: true,
      })),
    ],
    bands: entry.bands.map((pair) => ({ series: pair, fill: `${colour("--s1")}2e` })),
    hooks: { setCursor: [(chart) => legend(entry, chart.cursor.idx)], draw: [(chart) => drawMarks(entry, chart)] },
  };
}

// Dashed lines at positions on the x axis.
function drawMarks(entry, { ctx, bbox, valToPos }) {
  ctx.save();
  ctx.strokeStyle = colour("--warn");
  ctx.setLineDash([4, 4]);
  for (const at of entry.marks) {
    const x = Math.round(valToPos(at, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function legend(entry, at) {
  const last = entry.x.length - 1;
  const here = at ?? last;
  entry.legend.replaceChildren(
    h("span", {}, `${entry.xLabel} ${number(entry.x[here])}`),
    ...entry.series
      .map((one, index) => [one, index])
      .filter(([one]) => !one.quiet)
      .map(([one, index]) => {
        const key = h("span", { class: "key" });
        key.style.background = colour(COLOURS[(one.colour ?? index) % COLOURS.length]);
        return h("span", {}, key, `${one.label} ${number(one.values[here])}`);
      }),
  );
}

export function plot({ key, title, x, xLabel, series, bands = [], marks = [] }) {
  const names = series.map((one) => one.label).join("|") + document.documentElement.lang;
  let entry = kept.get(key);
  if (!entry || entry.names !== names) {
    entry?.chart?.destroy();
    entry = { names, key };
    entry.legend = h("div", { class: "legend" });
    entry.canvas = h("div", { "aria-hidden": "true" });
    entry.label = h("div", { class: "title" }, title);
    const csv = h(
      "button",
      {
        type: "button",
        class: "small",
        "data-focus": `csv-${key}`,
        "aria-label": t("csv_of", { title }),
        onclick: () =>
          saveCsv(
            key,
            [entry.xLabel, ...entry.series.map((one) => one.label)],
            entry.x.map((value, at) => [value, ...entry.series.map((one) => one.values[at])]),
          ),
      },
      "CSV",
    );
    entry.figure = h("figure", { "data-plot": key, "aria-label": title }, h("div", { class: "top" }, entry.label, csv), entry.canvas, entry.legend);
    entry.watch = new ResizeObserver(() => draw(entry));
    entry.watch.observe(entry.figure);
    kept.set(key, entry);
  }
  Object.assign(entry, { x, xLabel, series, bands, marks });
  draw(entry);
  return entry.figure;
}

function draw(entry) {
  const width = Math.floor(entry.canvas.clientWidth);
  if (!width) return;
  const theme = colour("--text");
  const data = [entry.x, ...entry.series.map((one) => one.values)];
  if (entry.chart && entry.theme === theme) {
    if (entry.chart.width !== width) entry.chart.setSize({ width, height: 190 });
    entry.chart.setData(data);
  } else {
    entry.chart?.destroy();
    entry.theme = theme;
    entry.chart = new uPlot(options(entry, width), data, entry.canvas);
  }
  legend(entry, null);
}

// The mean reward of each train step, with one standard deviation of its samples on both sides.
export function drawReward({ steps, marks, columns: { reward_mean: means, reward_std: deviations } }) {
  if (!means) return null;
  const bound = (sign) => means.map((mean, at) => (mean === null || !deviations ? null : mean + sign * deviations[at]));
  const series = [{ label: t("mean"), values: means }, { label: t("upper"), values: bound(1), quiet: true }, { label: t("lower"), values: bound(-1), quiet: true }];
  return plot({ key: "reward_mean", title: t("reward"), x: steps, xLabel: t("train_step"), series, bands: [[2, 3]], marks: marks.map((one) => one.step) });
}

export function forgetPlots() {
  for (const entry of kept.values()) {
    entry.watch.disconnect();
    entry.chart?.destroy();
  }
  kept.clear();
}
