/**
 * A line chart over steps, with marks for saves, evaluations, restarts and warnings.
 *
 * Input: a title, steps, values, marks. Output: an element with a uPlot chart, the newest
 * value or the value under the cursor, and a name for screen readers. Dragging zooms, a
 * double click shows all steps; all charts share cursor and zoom.
 */

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { palette } from "./colours.js";
import { el, say } from "./dom.js";
import { count } from "./format.js";

/** Sign, colour and name of a mark, by kind. Signs tell the kinds apart without colour. */
export const MARKS = {
  save: ["s", "muted", "save"],
  eval: ["e", "third", "evaluation"],
  restart: ["R", "accent", "restart"],
  warning: ["▲", "warn", "warning"],
  error: ["■", "bad", "error"],
};

/**
 * Make a chart. sayValue(number): text with unit; sayTick(number): short text of a tick;
 * top(values): largest value to show, null to show all.
 * Returns {element, rebuild(), show({steps, values, marks})}. Null values leave gaps; rebuild
 * reads the colours again.
 */
export function makeChart(title, colour, sayValue, sayTick, top = null) {
  const value = el("span", { class: "value" });
  const box = el("div", { class: "chart-box", role: "img", "aria-label": title });
  const element = el(
    "div",
    { class: "chart" },
    el("div", { class: "chart-head" }, el("h3", {}, title), value),
    box,
  );
  let plot = null;
  let shown = { steps: [], values: [], marks: [] };
  const sayAt = (index) => {
    const at = index ?? shown.values.findLastIndex((each) => each !== null);
    if (at < 0) say(value, "no values");
    else say(value, `step ${count(shown.steps[at])}: ${sayValue(shown.values[at])}`);
  };
  const range = (_, low, high) => {
    if (low === null || high === null) return [null, null];
    const end = Math.min(high, top(shown.values) ?? high);
    return uPlot.rangeNum(low, Math.max(low, end), 0.1, true);
  };
  const build = () => {
    plot?.destroy();
    plot = new uPlot(
      options(box, colour, sayTick, () => shown.marks, sayAt, top && range),
      [shown.steps, shown.values],
      box,
    );
  };
  new ResizeObserver(() => {
    if (!plot || !box.clientWidth || !box.clientHeight) return;
    if (plot.width !== box.clientWidth || plot.height !== box.clientHeight) {
      plot.setSize({ width: box.clientWidth, height: box.clientHeight });
    }
  }).observe(box);
  return {
    element,
    rebuild: () => {
      if (plot) build();
    },
    show(data) {
      shown = data;
      if (!plot) build();
      else plot.setData([data.steps, data.values]);
      sayAt(plot.cursor.idx);
      box.setAttribute("aria-label", describe(title, data, sayValue));
    },
  };
}

/** Describe a series in one sentence. */
export function describe(title, { steps, values }, sayValue) {
  const known = values.filter((each) => each !== null);
  if (!known.length) return `${title}: no values`;
  const [low, high] = known.reduce(
    ([a, b], each) => [Math.min(a, each), Math.max(b, each)],
    [Infinity, -Infinity],
  );
  return (
    `${title}, steps ${steps[0]} to ${steps.at(-1)}: now ${sayValue(known.at(-1))}, ` +
    `between ${sayValue(low)} and ${sayValue(high)}`
  );
}

function options(box, colour, sayTick, marks, sayAt, range) {
  const colours = palette();
  const font = "11px system-ui, sans-serif";
  const axis = {
    stroke: colours.muted,
    font,
    grid: { stroke: colours.grid, width: 1 },
    ticks: { stroke: colours.line, width: 1, size: 4 },
  };
  return {
    width: box.clientWidth || 400,
    height: box.clientHeight || 150,
    legend: { show: false },
    padding: [14, 8, 0, 0],
    cursor: {
      sync: { key: "steps", setSeries: false },
      y: false,
      points: { size: 6 },
      drag: { x: true, y: false },
    },
    scales: { x: { time: false }, y: range ? { range } : {} },
    axes: [
      {
        ...axis,
        size: 24,
        gap: 2,
        space: 80,
        incrs: [
          1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
        ],
        values: (_, all) => all.map(count),
      },
      {
        ...axis,
        size: 58,
        gap: 4,
        space: 28,
        values: (_, all) => all.map((value) => sayTick(value)),
      },
    ],
    series: [
      {},
      {
        stroke: colours[colour],
        width: 1, // a hairline: what a software renderer draws fastest
        spanGaps: false,
        points: { show: (plot, _, first, last) => last - first < 2 },
      },
    ],
    hooks: {
      setCursor: [(plot) => sayAt(plot.cursor.idx)],
      draw: [(plot) => drawMarks(plot, marks(), colours)],
    },
  };
}

function drawMarks(plot, marks, colours) {
  const { ctx, bbox } = plot;
  const ratio = window.devicePixelRatio || 1;
  ctx.save();
  ctx.font = `700 ${10 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "bottom";
  const signs = new Map();
  for (const mark of marks) {
    const [sign, name] = MARKS[mark.kind] ?? MARKS.warning;
    const x = Math.round(plot.valToPos(mark.step, "x", true)) + 0.5;
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = colours[name];
    const isStrong = mark.kind === "restart" || mark.kind === "error";
    ctx.globalAlpha = isStrong ? 0.9 : 0.35;
    ctx.lineWidth = ratio;
    ctx.setLineDash(isStrong ? [] : [2 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    signs.set(x, [...(signs.get(x) ?? []), [sign, colours[name]]]);
  }
  let end = -Infinity;
  for (const [x, list] of [...signs].sort((a, b) => a[0] - b[0])) {
    const wide = 9 * ratio;
    const begin = x - ((list.length - 1) * wide) / 2;
    if (begin < end) continue; // this sign would cover another one; its line stays
    list.forEach(([sign, colour], index) => {
      ctx.fillStyle = colour;
      ctx.fillText(sign, begin + index * wide, bbox.top - ratio);
    });
    end = begin + list.length * wide + 2 * ratio;
  }
  ctx.restore();
}
