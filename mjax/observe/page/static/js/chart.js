/**
 * A line chart over steps, with marks for saves, evaluations, restarts and warnings, and
 * with dots of a second series that has few values.
 *
 * Input: a title, steps, values, dots, marks. Output: an element with a uPlot chart, the newest
 * value or the value under the cursor, and a name for screen readers. Dragging zooms, a
 * double click shows all steps; all charts share cursor and zoom.
 */

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { palette } from "./colours.js";
import { el, say } from "./dom.js";
import { count } from "./format.js";
import { fitting, MARKS } from "./marks.js";

/**
 * Make a chart. sayValue(number): text with unit; sayTick(number): short text of a tick.
 * Options: top(values), largest value to show; dotsName, name of the dots; onLeftOut(kinds),
 * told which kinds of marks do not fit.
 * Returns {element, rebuild(), show({steps, values, dots, marks})}. Null values leave gaps;
 * rebuild reads the colours again.
 */
export function makeChart(title, colour, sayValue, sayTick, more = {}) {
  const { top = null, dotsName = null, onLeftOut = () => {} } = more;
  const value = el("span", { class: "value" });
  const box = el("div", { class: "chart-box", role: "img", "aria-label": title });
  const element = el(
    "div",
    { class: "chart" },
    el("div", { class: "chart-head" }, el("h3", {}, title), value),
    box,
  );
  let plot = null;
  let shown = { steps: [], values: [], dots: [], marks: [] };
  const sayAt = (index) => {
    const at = index ?? shown.values.findLastIndex((each) => each !== null);
    if (at < 0) say(value, "no values");
    else {
      const text = `step ${count(shown.steps[at])}: ${sayValue(shown.values[at])}`;
      say(value, text + sayDot(at));
    }
  };
  const sayDot = (at) => {
    const dot = dotsName ? lastKnown(shown.dots, at) : -1;
    return dot < 0 ? "" : `, ● ${dotsName} ${sayValue(shown.dots[dot])}`;
  };
  const columns = () => [shown.steps, shown.values, ...(dotsName ? [shown.dots] : [])];
  const range = (_, low, high) => {
    if (low === null || high === null) return [null, null];
    const end = Math.min(high, top(shown.values) ?? high);
    return uPlot.rangeNum(low, Math.max(low, end), 0.1, true);
  };
  const build = () => {
    plot?.destroy();
    const colours = palette();
    plot = new uPlot(
      options(box, [colour, ...(dotsName ? ["third"] : [])], sayTick, top && range, {
        setCursor: [(plot) => sayAt(plot.cursor.idx)],
        draw: [(plot) => onLeftOut(drawMarks(plot, shown.marks, colours))],
      }),
      columns(),
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
      else plot.setData(columns());
      sayAt(plot.cursor.idx);
      box.setAttribute("aria-label", describe(title, data, sayValue) + sayDot(Infinity));
    },
  };
}

/** Return the index of the last value that is known, up to an index; -1 if none is. */
function lastKnown(values, upTo) {
  let at = Math.min(upTo, values.length - 1);
  while (at >= 0 && values[at] === null) at -= 1;
  return at;
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

function options(box, [line, ...dots], sayTick, range, hooks) {
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
        stroke: colours[line],
        width: 1, // a hairline: what a software renderer draws fastest
        spanGaps: false,
        points: { show: (plot, _, first, last) => last - first < 2 },
      },
      ...dots.map((name) => ({
        stroke: colours[name],
        paths: () => null,
        points: { show: true, size: 4, width: 0, fill: colours[name] },
      })),
    ],
    hooks,
  };
}

/** Draw the marks that fit; return the kinds that do not. */
function drawMarks(plot, marks, colours) {
  const { ctx, bbox } = plot;
  const ratio = window.devicePixelRatio || 1;
  ctx.save();
  ctx.font = `700 ${10 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "bottom";
  const signs = new Map();
  const ends = [bbox.left, bbox.left + bbox.width].map((x) => x / ratio);
  const { drawn, leftOut } = fitting(marks, (step) => plot.valToPos(step, "x", true) / ratio, ends);
  for (const [mark, at] of drawn) {
    const [sign, name] = MARKS[mark.kind] ?? MARKS.warning;
    const x = Math.round(at * ratio) + 0.5;
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
  return leftOut;
}
