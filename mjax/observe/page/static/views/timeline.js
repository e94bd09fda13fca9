/**
 * Timeline: what each rank and each of its devices did, on one clock.
 *
 * Input: /api/timeline for some steps and ranks. Output: the picture; the chosen span with
 * its times, its clock's error and the spans that it waits for; a table of times by row.
 */

import { get } from "../js/api.js";
import { makePicture } from "../js/canvas.js";
import { onScheme, palette } from "../js/colours.js";
import { button, choice, el, empty, fill } from "../js/dom.js";
import { redrawer, work } from "../js/draws.js";
import { parseRanks, plural, ranks as sayRanks } from "../js/format.js";
import { zoom } from "../js/range.js";
import { drawAbove, drawTimeline, frame } from "../js/timeline_canvas.js";
import { model as makeModel, waitsFor } from "../js/timeline_data.js";
import { problemList } from "./ledger.js";
import { attach, bringIntoView, LEAST_US } from "./timeline_gestures.js";
import { showLegend, showMarks, showPicked, showReadout, showTotals } from "./timeline_parts.js";

const DEFAULT_RANKS = 16;
const MOST_RANKS = 512; // more rows than anybody scrolls through
const KEYS =
  "Left and right move in time, up and down move through rows, + and − zoom, 0 shows all, [ and ] choose the span " +
  "before and after. Drag moves, Shift and drag zooms to a part, Ctrl and wheel zooms.";

/** Make the view. */
export function make({ store }) {
  const is = {
    model: null,
    view: null,
    hovered: null,
    picked: null,
    waits: [],
    dragged: null,
    visible: false,
    colours: palette(),
    group: "pp",
    following: true,
    drawn: null,
    asking: null,
  };
  const ui = {
    details: el("section", { class: "panel detail", "aria-label": "Chosen span" }),
    totals: el("section", { class: "panel", "aria-label": "Times by row" }),
    legend: el("ul", { class: "legend" }),
    readout: el("p", { class: "readout", role: "status" }),
    told: el("p", { class: "muted", role: "status" }),
    problems: el("div", {}),
    marks: el("div", {}),
    body: el("div", {}),
  };
  const picture = makePicture(
    "Timeline, a row for each stream of each rank",
    "ArrowLeft ArrowRight ArrowUp ArrowDown + - 0 [ ]",
    "timeline-keys",
  );
  const shown = [
    ui.legend,
    picture.box,
    ui.readout,
    el("p", { class: "keys", id: "timeline-keys" }, KEYS),
  ];
  const fields = makeFields();
  const element = el(
    "div",
    { class: "timeline" },
    el("section", { class: "panel", "aria-label": "Timeline" }, fields.box, ui.told, ui.body),
    ui.problems,
    ui.marks,
    el("div", { class: "columns" }, ui.totals, ui.details),
  );

  const draw = redrawer("timeline", () => {
    if (!is.visible || !is.model || !picture.width) return false;
    is.view.top = Math.min(Math.max(is.view.top, 0), frame(picture, is.model).hidden);
    const drawn = drawTimeline(picture, is.model, is.view, is.colours);
    drawAbove(picture, is.model, is.view, is, is.colours);
    if (JSON.stringify(drawn) !== JSON.stringify(is.drawn)) showLegend(ui.legend, is.model, drawn);
    is.drawn = drawn;
    return true;
  });
  const drawCursor = redrawer("timeline", () => {
    if (!is.visible || !is.model) return false;
    drawAbove(picture, is.model, is.view, is, is.colours);
    showReadout(ui.readout, is);
    return true;
  });
  const change = (x, kind) => {
    is.view.x = x;
    draw(kind);
  };
  const pick = (span) =>
    work("timeline", () => {
      is.picked = span;
      is.waits = span === null ? [] : waitsFor(is.model, span);
      showPicked(ui.details, is, pick);
      showReadout(ui.readout, is);
      if (span !== null) bringIntoView(is, picture, span);
      draw("pick");
    });

  async function load(kind = "first") {
    const run = store.get("run");
    const known = (run?.ranks ?? []).map((each) => each.rank);
    const typed = fields.ranks.value.trim();
    const wanted = typed ? parseRanks(typed, known) : { ranks: known.slice(0, DEFAULT_RANKS) };
    if (wanted.ranks?.length > MOST_RANKS) {
      wanted.error = `a timeline shows at most ${MOST_RANKS} ranks, not ${wanted.ranks.length}; choose fewer`;
    }
    fields.ranks.setAttribute("aria-invalid", wanted.error ? "true" : "false");
    if (wanted.error && known.length) {
      ui.told.textContent = wanted.error;
      return;
    }
    const num = Number(fields.num.select.value);
    const from = is.following ? null : Math.max(1, Number(fields.from.value) || 1);
    is.asking?.abort();
    is.asking = new AbortController();
    try {
      const answer = await get(
        "timeline",
        {
          view: is.group,
          from,
          to: from === null ? null : from + num - 1,
          ranks: wanted.ranks?.length ? wanted.ranks.join(",") : null,
        },
        is.asking.signal,
      );
      work("timeline", () => show(answer, kind));
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!is.model) fill(ui.body, empty("No spans to show yet", error.message));
      else ui.told.textContent = error.message;
    }
  }
  function show(answer, kind) {
    is.model = makeModel(answer);
    Object.assign(is, {
      hovered: null,
      picked: null,
      waits: [],
      drawn: null,
      view: { x: [is.model.begin, is.model.end], top: 0 },
    });
    const { first, last } = answer;
    if (is.following && first) fields.from.value = first;
    const all = [...new Set(answer.rows.map((row) => row.rank))];
    ui.told.textContent =
      `${plural(answer.spans.row.length, "span")} of rank ${sayRanks(all)}, ` +
      `steps ${first} to ${last}` +
      (answer.cut ? "; cut: there are more spans, choose fewer steps or ranks" : "");
    if (!answer.spans.row.length) {
      is.model = null;
      return fill(
        ui.body,
        empty(
          "No spans in these steps",
          answer.problems?.[0] ??
            "Choose other steps or ranks; the newest step appears one step late.",
        ),
      );
    }
    if (ui.body.firstChild !== shown[0]) fill(ui.body, shown);
    const height = Math.max(200, Math.min(640, answer.rows.length * 24 + 44));
    picture.box.style.height = `min(${height}px, 70vh)`;
    fill(ui.problems, problemList(answer.problems));
    showTotals(ui.totals, is.model);
    showMarks(ui.marks, answer.marks ?? []);
    showPicked(ui.details, is, pick);
    showReadout(ui.readout, is);
    return draw(kind);
  }

  fields.ranks.addEventListener("change", () => load("pick"));
  fields.from.addEventListener("change", () => {
    is.following = false;
    load("pick");
  });
  fields.num.select.addEventListener("change", () => {
    pinned();
    load("pick");
  });
  fields.group.select.addEventListener("change", () => {
    is.group = fields.group.select.value;
    load("pick");
  });
  const pinned = () => {
    is.following = false;
  };
  const move = (sign) => {
    pinned();
    fields.from.value = Math.max(
      1,
      Number(fields.from.value || 1) + sign * Number(fields.num.select.value),
    );
    load("pick");
  };
  fields.buttons.append(
    button("Earlier", () => move(-1)),
    button("Later", () => move(1)),
    button("Newest", () => {
      is.following = true;
      load("pick");
    }),
  );
  const limits = () => [is.model.begin, is.model.end];
  const zoomBy = (factor) =>
    is.model &&
    change(zoom(is.view.x, factor, (is.view.x[0] + is.view.x[1]) / 2, limits(), LEAST_US), "zoom");
  fields.zoom.append(
    button("Zoom in", () => zoomBy(0.5)),
    button("Zoom out", () => zoomBy(2)),
    button("Show all", () => is.model && change(limits(), "zoom")),
  );
  picture.onResize = () => draw("resize");
  onScheme(() => {
    is.colours = palette();
    draw("resize");
  });
  attach(picture, is, { change, draw, drawCursor, pick, limits });
  fill(ui.body, empty("Reading the spans", "The server aligns the clocks of all ranks."));
  store.on(["run"], () => {
    if (is.visible && !is.model) load();
  });
  return {
    element,
    show() {
      is.visible = true;
      if (!is.model) load();
      draw("first");
    },
    hide() {
      is.visible = false;
    },
  };
}

function makeFields() {
  const ranks = el("input", {
    type: "text",
    size: "14",
    placeholder: "0-15, 32",
    inputmode: "text",
  });
  const from = el("input", { type: "number", min: "1", size: "6", style: { width: "7em" } });
  const num = choice(
    "Steps",
    ["1", "2", "3", "5"].map((each) => [each, each]),
    "2",
    () => {},
  );
  const group = choice(
    "Neighbours",
    [
      ["pp", "of a pipeline"],
      ["dp", "of data parallelism"],
      ["tp", "of tensor parallelism"],
    ],
    "pp",
    () => {},
  );
  const [buttons, zoomGroup] = [el("div", { class: "group" }), el("div", { class: "group" })];
  const label = (text, input) => el("label", { class: "field" }, el("span", {}, text), input);
  return {
    ranks,
    from,
    num,
    group,
    buttons,
    zoom: zoomGroup,
    box: el(
      "div",
      { class: "controls" },
      label("Ranks", ranks),
      label("From step", from),
      num.box,
      group.box,
      buttons,
      zoomGroup,
    ),
  };
}
