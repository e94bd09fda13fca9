/**
 * Heat map: the time of one phase, rank x step, with slow hosts marked and listed.
 *
 * Input: /api/heat, the part stragglers of the store. Output: the picture, a readout of the
 * cell under the cursor, the list of slow hosts, and a table of the slowest ranks in the
 * visible part.
 */

import { getHeat } from "../js/api.js";
import { makePicture } from "../js/canvas.js";
import { onScheme, palette, pixels } from "../js/colours.js";
import { button, choice, el, empty, fill, setOptions } from "../js/dom.js";
import { redrawer, work } from "../js/draws.js";
import { drawAbove, drawHeat } from "../js/heat_canvas.js";
import * as data from "../js/heat_data.js";
import { clamp } from "../js/range.js";
import { attach, limitsOf, wholeOf, zoomed } from "./heat_gestures.js";
import { showLegend, showOutliers, showReadout, showSlowest } from "./heat_parts.js";

const MOST_CELLS = 2 ** 23; // maximum number to keep; as many as the server keeps
// Seconds between requests of new columns; the load of the server is low.
const EVERY_S = 4;
const WHOLE_EVERY_S = 30; // the same for the whole matrix, which costs more
const FAR_BEHIND = 3; // steps; ranks of one run differ by at most one step
const FIRST_PHASE = ["tick", "forward", "step", "device"];
const NO_SPANS =
  "No steps have been read yet. They appear after the first step; a run that was started with --observe.no-spans has none.";
const KEYS =
  "Arrow keys move the cursor, Shift with arrow keys moves the part, + and − zoom at the " +
  "cursor, 0 shows all, Enter opens the rank in Groups. Drag a rectangle to zoom.";

/** Make the view. */
export function make(context) {
  const { store, go } = context;
  const ui = controls();
  const picture = makePicture(
    "Heat map, rank by step",
    "ArrowUp ArrowDown ArrowLeft ArrowRight + - 0 Enter",
    "heat-keys",
  );
  const is = {
    model: null,
    view: null,
    cursor: null,
    dragged: null,
    visible: false,
    phase: null,
    scale: "ratio",
    order: "host",
    asked: 0,
    whole: 0,
    colours: palette(),
    lut: null,
    problem: null,
  };
  const body = el("div", {});
  const element = el(
    "div",
    { class: "heat" },
    el("section", { class: "panel", "aria-label": "Heat map" }, ui.controls, body),
    ui.outliers,
    ui.slowest,
  );
  const shown = [
    ui.legend,
    picture.box,
    ui.readout,
    el("p", { class: "keys", id: "heat-keys" }, KEYS),
  ];

  const draw = redrawer("heat", () => {
    if (!is.visible || !is.model || !picture.width) return false;
    is.lut ??= pixels(is.colours.none);
    drawHeat(picture, is.model, is.view, is.lut, is.colours);
    drawAbove(picture, is.model, is.view, is.cursor, is.dragged, is.colours);
    return true;
  });
  const drawCursor = redrawer("heat", () => {
    if (!is.visible || !is.model) return false;
    drawAbove(picture, is.model, is.view, is.cursor, is.dragged, is.colours);
    showReadout(ui.readout, is);
    return true;
  });
  const settle = later(() => {
    if (is.visible && is.model) showSlowest(ui.slowest, is, go);
  }, 150);

  const remodel = (matrix, kind) =>
    work("heat", () => {
      const whole = !is.model || wholeOf(is);
      is.model = {
        ...modelOf(matrix, is, kind),
        outliers: store.get("stragglers")?.outliers ?? [],
      };
      const limits = limitsOf(is.model);
      is.view =
        whole || !is.view
          ? { x: [...limits.x], y: [...limits.y] }
          : { x: clamp(is.view.x, limits.x), y: clamp(is.view.y, limits.y) };
      picture.box.style.height =
        matrix.rows < 18 ? `${Math.max(120, matrix.rows * 44 + 28)}px` : "";
      picture.box.style.minHeight = matrix.rows < 18 ? "0" : "";
      showLegend(ui.legend, is);
      setOptions(
        ui.phase.select,
        matrix.phases.map((each) => [each, each]),
        matrix.phase,
      );
      draw(kind);
      settle();
    });
  async function load(isNews = false) {
    is.asked = performance.now();
    try {
      const old = is.model?.matrix;
      const canAppend = isNews && old?.cols && old.steps.at(-1) - old.steps[0] === old.cols - 1;
      // Columns of several steps cannot be appended: request the whole matrix, less often.
      if (isNews && old?.cols && !canAppend && is.asked - is.whole < 1000 * WHOLE_EVERY_S) return;
      if (!canAppend) is.whole = is.asked;
      const to = lastWhole(store.get("state"));
      const params = { phase: is.phase, from: canAppend ? old.steps.at(-1) + 1 : null, to };
      if (canAppend && to !== null && to < params.from) return;
      let found = data.matrix(await getHeat(params));
      if (canAppend && found.phase === is.phase) {
        if (!found.cols) return;
        found =
          work("heat", () =>
            data.appended(old, found, Math.max(1000, Math.floor(MOST_CELLS / old.rows))),
          ) ?? data.matrix(await getHeat({ phase: is.phase, to }));
      }
      const liked =
        is.phase ?? FIRST_PHASE.find((each) => found.phases.includes(each)) ?? found.phase;
      if (liked !== found.phase) found = data.matrix(await getHeat({ phase: liked, to }));
      if (!found.rows || !found.cols) throw new Error(NO_SPANS);
      is.phase = found.phase;
      is.problem = null;
      if (body.firstChild !== shown[0]) {
        fill(body, shown);
        showReadout(ui.readout, is);
      }
      remodel(found, isNews ? "live" : "first");
    } catch (error) {
      is.problem = error.message;
      if (!is.model) fill(body, empty("No times to show yet", is.problem));
    }
  }
  const change = (view, kind) => {
    is.view = view;
    draw(kind);
    settle();
  };
  const all = () => change(limitsOf(is.model), "zoom");
  ui.phase.select.addEventListener("change", () => {
    is.phase = ui.phase.select.value;
    load();
  });
  ui.scale.select.addEventListener("change", () => {
    is.scale = ui.scale.select.value;
    if (is.model) remodel(is.model.matrix, "pick");
  });
  ui.order.select.addEventListener("change", () => {
    is.order = ui.order.select.value;
    is.cursor = null;
    if (is.model) remodel(is.model.matrix, "pick");
  });
  ui.buttons.append(
    button("Zoom in", () => is.model && change(zoomed(is, 0.5), "zoom")),
    button("Zoom out", () => is.model && change(zoomed(is, 2), "zoom")),
    button("Show all", () => is.model && all()),
  );
  picture.onResize = () => draw("resize");
  onScheme(() => {
    is.colours = palette();
    is.lut = null;
    draw("resize");
  });
  attach(picture, is, { change, all, drawCursor, go });
  store.on(["stragglers"], () => {
    showOutliers(ui.outliers, store.get("stragglers"), go);
    if (is.model) {
      is.model.outliers = store.get("stragglers")?.outliers ?? [];
      draw("live");
    }
  });
  store.on(["state"], (state) => {
    const last = is.model?.matrix.steps.at(-1) ?? 0;
    const isNew = (lastWhole(state) ?? 0) > last;
    if (is.visible && isNew && performance.now() - is.asked > 1000 * EVERY_S) load(true);
  });
  showOutliers(ui.outliers, store.get("stragglers"), go);
  fill(body, empty("Reading the spans", "The server adds up the times of this phase."));
  return {
    element,
    show() {
      is.visible = true;
      if (is.model) load(true);
      else load();
      draw("first");
    },
    hide() {
      is.visible = false;
    },
  };
}

/**
 * Return the last step that all running ranks have ended; null if unknown. A column is
 * requested only once, so it must be complete. Ranks that are far behind are ignored.
 */
function lastWhole(state) {
  const steps = (state?.ranks ?? []).filter((each) => each.ended === null).map((each) => each.step);
  if (!steps.length) return null;
  const [least, most] = steps.reduce(
    ([low, high], step) => [Math.min(low, step), Math.max(high, step)],
    [Infinity, 0],
  );
  return Math.max(least, most - FAR_BEHIND) || null;
}

/** Return the model: medians, order and bytes. Appended columns reuse the old model. */
function modelOf(matrix, { model, scale: scaleOf, order: by }, kind) {
  const { fresh, drop } = matrix;
  const goesOn = kind === "live" && fresh && model;
  const news = fresh && data.stepMedians(fresh);
  const medians = goesOn
    ? Uint8Array.from([...model.medians.subarray(drop), ...news])
    : data.stepMedians(matrix);
  const order =
    goesOn && by === "host"
      ? model.order
      : data.ordered(matrix, by === "slow" ? data.rowMeans(matrix) : null);
  const bands = order === model?.order ? model.bands : data.hostBands(matrix, order);
  if (scaleOf !== "ratio") return { matrix, medians, order, bands, bytes: matrix.bytes };
  const bytes = goesOn
    ? data.joined(model.bytes, data.relative(fresh, news), matrix.rows, drop)
    : data.relative(matrix, medians);
  return { matrix, medians, order, bands, bytes };
}

function controls() {
  const phase = choice("Phase", [], "", () => {});
  const scaleOf = choice(
    "Show",
    [
      ["ratio", "relative to the step's median"],
      ["value", "milliseconds"],
    ],
    "ratio",
    () => {},
  );
  const order = choice(
    "Rows",
    [
      ["host", "by host"],
      ["slow", "slowest first"],
    ],
    "host",
    () => {},
  );
  const buttons = el("div", { class: "group" });
  return {
    phase,
    scale: scaleOf,
    order,
    buttons,
    controls: el("div", { class: "controls" }, phase.box, scaleOf.box, order.box, buttons),
    legend: el("div", { class: "legend" }),
    readout: el("p", { class: "readout", role: "status" }),
    outliers: el("section", { class: "panel", "aria-label": "Slow hosts" }),
    slowest: el("section", { class: "panel", "aria-label": "Slowest ranks" }),
  };
}

function later(call, wait_ms) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, wait_ms);
  };
}
