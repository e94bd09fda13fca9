/**
 * Parts around the heat map: readout, legend, slow hosts, slowest ranks.
 *
 * Input: the model and the cursor of views/heat.js, the part stragglers of the store.
 * Output: elements.
 */

import { gradient } from "../js/colours.js";
import { button, el, fill, table } from "../js/dom.js";
import { count, millis, percent, plural, ranks, times } from "../js/format.js";
import { letter } from "../js/heat_canvas.js";
import * as data from "../js/heat_data.js";

/** Phases that include waits for others, with an explanation. */
const WAITS = {
  tick: "a tick includes waits for other stages, so a rank with long ticks may be waiting",
  norm: "all ranks end together, so the one with the shortest time came last",
  device: "the host waits for all devices; a slow device is visible in its own phases",
};
// Ratio to the step's median above which a step counts as slow; not measured.
const OVER = 1.1;

/** Show the value of the cell under the cursor. */
export function showReadout(box, is) {
  const { model, cursor } = is;
  if (!model || !cursor || cursor.byte < 0) {
    fill(
      box,
      el("span", { class: "muted" }, "Point at a cell, or press an arrow key, for its value."),
    );
    return;
  }
  const { matrix, medians } = model;
  const value = data.valueOf(
    matrix.bytes[cursor.row * matrix.cols + cursor.col],
    matrix.lo,
    matrix.hi,
  );
  const usual = data.valueOf(medians[cursor.col], matrix.lo, matrix.hi);
  const isOver = value !== null && value >= matrix.hi && matrix.max > matrix.hi;
  fill(
    box,
    el("b", {}, `rank ${matrix.ranks[cursor.row]}`),
    el("span", {}, matrix.hosts[cursor.row]),
    el("span", {}, `step ${count(matrix.steps[cursor.col])}`),
    el(
      "b",
      {},
      value === null ? "no value" : `${matrix.phase} ${isOver ? "at least " : ""}${millis(value)}`,
    ),
    value === null
      ? null
      : el("span", {}, `${times(value / usual)} the step's median of ${millis(usual)}`),
  );
}

/** Explain the colours. */
export function showLegend(box, is) {
  const { matrix } = is.model;
  const [low, high] =
    is.scale === "ratio"
      ? data.RATIO.map((each, end) => `${end ? "over " : "under "}${times(each)}`)
      : [
          millis(matrix.lo),
          matrix.max > matrix.hi * 1.001 ? `over ${millis(matrix.hi)}` : millis(matrix.hi),
        ];
  fill(
    box,
    el("span", {}, low),
    el("span", { class: "ramp", style: { background: gradient() } }),
    el("span", {}, high),
    el(
      "span",
      {},
      el("span", { class: "swatch", style: { background: "var(--none)" } }),
      " no value",
    ),
    el(
      "span",
      {},
      `${plural(matrix.rows, "rank")} × ${plural(matrix.cols, "step")}; a pixel shows its slowest cell; frame and letter: slow host`,
    ),
    WAITS[matrix.phase] ? el("b", {}, `▲ ${WAITS[matrix.phase]}`) : null,
  );
}

/** List the slow hosts, with their letters in the picture. */
export function showOutliers(box, found, go) {
  const list = found?.outliers ?? [];
  const title = el("h2", {}, "Slow hosts");
  if (!list.length) {
    fill(
      box,
      title,
      el(
        "p",
        { class: "muted" },
        found?.problem ??
          (found
            ? "No host is slower than its peers beyond the noise."
            : "The server is comparing the hosts."),
      ),
    );
    return;
  }
  fill(
    box,
    title,
    table(
      "Hosts that are slower than their peers in a phase",
      [
        { head: "mark", cell: (row) => el("span", { class: "letter" }, letter(list.indexOf(row))) },
        { head: "host", cell: (row) => row.host },
        {
          head: "ranks",
          cell: (row) =>
            button(ranks(row.ranks, 4), () => go("groups", { rank: row.ranks[0] }), {
              class: "linkish",
              "aria-label": `ranks ${ranks(row.ranks, 4)}: show them among their groups`,
            }),
        },
        { head: "phase", cell: (row) => row.phase },
        { head: "cause", cell: (row) => row.cause },
        { head: "times its peers", num: true, cell: (row) => times(row.ratio) },
        { head: "part of a step", num: true, cell: (row) => percent(row.cost) },
        { head: "since step", num: true, cell: (row) => count(row.since_step) },
        { head: "confidence", num: true, cell: (row) => row.confidence.toFixed(2) },
      ],
      list,
    ),
  );
}

/** List the slowest ranks of the visible part, as a text version of the picture. */
export function showSlowest(box, is, go) {
  const { matrix, medians } = is.model;
  const [from, to] = [Math.floor(is.view.x[0]), Math.min(Math.ceil(is.view.x[1]), matrix.cols)];
  const means = data.rowMeans(matrix, from, to);
  const inView = [...is.model.order.subarray(Math.floor(is.view.y[0]), Math.ceil(is.view.y[1]))];
  const known = inView.filter((row) => means[row]).sort((a, b) => means[b] - means[a]);
  const title = el("h2", {}, `Slowest ranks in ${matrix.phase}`);
  if (!known.length)
    return fill(box, title, el("p", { class: "muted" }, "No values in this part."));
  const mean = (row) => data.valueOf(means[row], matrix.lo, matrix.hi);
  const usual = mean(known[known.length >> 1]);
  const over = (row) => data.timesOver(matrix, medians, row, from, to, OVER);
  return fill(
    box,
    title,
    table(
      `Means of steps ${count(matrix.steps[from])} to ${count(matrix.steps[to - 1])}, the visible part; ` +
        `the median of ${plural(known.length, "rank")} is ${millis(usual)}`,
      [
        {
          head: "rank",
          num: true,
          cell: (row) =>
            button(`${matrix.ranks[row]}`, () => go("groups", { rank: matrix.ranks[row] }), {
              class: "linkish",
              "aria-label": `rank ${matrix.ranks[row]}: show it among its groups`,
            }),
        },
        { head: "host", cell: (row) => matrix.hosts[row] },
        { head: "mean", num: true, cell: (row) => millis(mean(row)) },
        { head: "times the others", num: true, cell: (row) => times(mean(row) / usual) },
        {
          head: `steps over ${times(OVER)}`,
          num: true,
          cell: (row) => over(row).map(count).join(" of "),
        },
      ],
      known.slice(0, 10),
    ),
  );
}
