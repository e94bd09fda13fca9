/**
 * Groups: every device as a cell, by stage, replica and tensor-parallel member.
 *
 * Input: the parts run, state, stuck, stragglers of the store; /api/rank for the chosen
 * rank; /api/heat for the time of a phase. Output: the picture, coloured by state; the
 * chosen rank with its groups, data flow, last operation, error and stacks.
 */

import { get, getHeat } from "../js/api.js";
import { follow, makePicture } from "../js/canvas.js";
import { onScheme, palette } from "../js/colours.js";
import { button, choice, el, empty, fill, setOptions } from "../js/dom.js";
import { redrawer, work } from "../js/draws.js";
import { drawAbove, drawMesh, frame } from "../js/mesh_canvas.js";
import { cellAt, cells, groupsOf, layout, neighbour } from "../js/mesh_layout.js";
import { ageScale, lagScale, marksOf, phaseScale, phaseTimes } from "../js/mesh_state.js";
import { showBehind, showLegend, showLines, showRank, showReadout } from "./groups_parts.js";

const BY = [
  ["age", "age of the last span"],
  ["lag", "steps behind the first"],
];
const PHASE_EVERY_S = 20;
const LOADING = ["Loading", "The server reads the headers of all spans."];
const KEYS = "Arrow keys move between devices, Enter chooses the rank, Escape clears the choice.";

/** Make the view. */
export function make(context) {
  const { store, go } = context;
  const is = {
    made: null,
    laid: null,
    picked: null,
    cursor: null,
    by: "age",
    times: null,
    asked: -Infinity,
    visible: false,
    colours: palette(),
    run: null,
    answer: null,
  };
  const ui = {
    legend: el("div", { class: "legend" }),
    lines: el("ul", { class: "legend" }),
    readout: el("p", { class: "readout", role: "status" }),
    body: el("div", {}),
    detail: el("section", { class: "panel detail", "aria-label": "Chosen rank" }),
    behind: el("section", { class: "panel", "aria-label": "Ranks behind" }),
  };
  const picture = makePicture(
    "All devices by pipeline stage, data- and tensor-parallel place",
    "ArrowUp ArrowDown ArrowLeft ArrowRight Enter Escape",
    "mesh-keys",
  );
  const shown = [
    ui.legend,
    picture.box,
    ui.lines,
    ui.readout,
    el("p", { class: "keys", id: "mesh-keys" }, KEYS),
  ];
  const by = choice("Colour", BY, "age", (value) => {
    is.by = value;
    is.asked = -Infinity;
    news("pick");
  });
  const number = el("input", { type: "number", min: "0", style: { width: "7em" } });
  const show = button("Show", () => choose(Number(number.value)));
  number.addEventListener("change", () => choose(Number(number.value)));
  const element = el(
    "div",
    { class: "mesh" },
    el(
      "div",
      { class: "columns" },
      el(
        "section",
        { class: "panel", "aria-label": "Parallel groups" },
        el(
          "div",
          { class: "controls" },
          by.box,
          el("label", { class: "field" }, el("span", {}, "Rank"), number),
          show,
        ),
        ui.body,
      ),
      ui.detail,
    ),
    ui.behind,
  );

  const draw = redrawer("groups", () => {
    if (!is.visible || !is.made || !picture.width) return false;
    is.laid = layout(is.made, frame(picture));
    drawMesh(picture, is.made, is.laid, is.state, is.picked, is.colours);
    drawAbove(picture, is.made, is.laid, is.picked, is.cursor, is.colours);
    return true;
  });
  const drawCursor = redrawer("groups", () => {
    if (!is.visible || !is.laid) return false;
    drawAbove(picture, is.made, is.laid, is.picked, is.cursor, is.colours);
    showReadout(ui.readout, is);
    return true;
  });

  const news = (kind) =>
    is.visible &&
    work("groups", () => {
      const run = store.get("run");
      if (!run || (!run.failed && !run.is_complete && !run.ranks.length)) {
        fill(ui.body, empty(...LOADING));
        return;
      }
      if (!run.ranks?.length) {
        fill(
          ui.body,
          empty(
            "No ranks yet",
            run.problem ?? "Ranks appear when their processes have written their first spans.",
          ),
        );
        return;
      }
      if (run !== is.run) {
        is.run = run;
        is.made = cells(run);
        number.max = String(Math.max(...run.ranks.map((each) => each.rank)));
        is.cursor = is.cursor !== null && is.cursor < is.made.list.length ? is.cursor : null;
        if (is.picked)
          is.picked = { rank: is.picked.rank, groups: groupsOf(is.made, is.picked.rank) };
        const rows = Math.max(120, Math.min(640, is.made.dp * 84 + 34));
        const isSmall = is.made.list.length < 65;
        picture.box.style.height = isSmall ? `${rows}px` : "";
        picture.box.style.minHeight = isSmall ? "0" : "";
      }
      if (ui.body.firstChild !== shown[0]) fill(ui.body, shown);
      restate();
      draw(kind);
      showReadout(ui.readout, is);
      showBehind(ui.behind, is, choose);
    });
  function restate() {
    const rows = new Map((store.get("state")?.ranks ?? []).map((each) => [each.rank, each]));
    const scale =
      is.by === "age" ? ageScale(rows) : is.by === "lag" ? lagScale(rows) : phaseScale(is.times);
    is.rows = rows;
    is.state = { ...scale, marks: marksOf(store, is.run, is.colours) };
    showLegend(ui.legend, is);
    showLines(ui.lines, is);
    if (is.by.startsWith("phase:") && performance.now() - is.asked > PHASE_EVERY_S * 1000)
      loadPhase();
  }
  async function loadPhase() {
    is.asked = performance.now();
    const phase = is.by.slice(6);
    try {
      const step =
        store.get("state")?.ranks?.reduce((most, each) => Math.max(most, each.step), 0) ?? 0;
      is.times = phaseTimes(await getHeat({ phase, from: Math.max(1, step - 50) }));
      news("pick");
    } catch (error) {
      fill(ui.readout, error.message);
    }
  }
  async function loadPhases() {
    try {
      const { header } = await getHeat({ from: store.get("run")?.newest_step ?? 1 });
      setOptions(
        by.select,
        [...BY, ...header.phases.map((each) => [`phase:${each}`, `time of ${each}`])],
        is.by,
      );
    } catch {
      // Without spans there are no phases to choose; the other colours work.
    }
  }
  async function choose(rank) {
    if (rank === null || !is.made?.byRank.has(rank)) {
      is.picked = null;
      showRank(
        ui.detail,
        rank === null ? null : { problem: `there is no rank ${rank}` },
        choose,
        go,
      );
      return draw("pick");
    }
    work("groups", () => {
      is.picked = { rank, groups: groupsOf(is.made, rank) };
    });
    number.value = String(rank);
    is.cursor = null;
    draw("pick");
    showLines(ui.lines, is);
    showReadout(ui.readout, is);
    try {
      const answer = await get("rank", { rank });
      if (is.picked?.rank === rank) showRank(ui.detail, answer, choose, go);
    } catch (error) {
      showRank(ui.detail, { problem: error.message }, choose, go);
    }
    return null;
  }
  picture.onResize = () => draw("resize");
  onScheme(() => {
    is.colours = palette();
    if (is.made) {
      restate();
      draw("resize");
    }
  });
  attach(picture, is, { choose, drawCursor });
  showRank(ui.detail, null, choose, go);
  fill(ui.body, empty(...LOADING));
  store.on(["state"], () => news("live"));
  store.on(["run", "stuck", "stragglers"], () => news("live"));
  return {
    element,
    show() {
      is.visible = true;
      news("first");
      if (by.select.options.length === BY.length) loadPhases();
      const wanted = context.detail?.rank ?? null;
      context.detail = null;
      if (wanted !== null) choose(wanted);
    },
    hide() {
      is.visible = false;
    },
  };
}

function attach(picture, is, { choose, drawCursor }) {
  follow(picture, {
    hover(at) {
      is.cursor = at && is.laid ? cellAt(is.made, is.laid, at) : null;
      drawCursor("hover");
    },
    click(at) {
      const index = is.laid && cellAt(is.made, is.laid, at);
      if (index !== null) choose(is.made.list[index].rank);
    },
  });
  picture.box.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const move = moves[event.key];
    if (!is.made || event.ctrlKey || event.metaKey || event.altKey) return;
    if (move) {
      is.cursor =
        is.cursor === null
          ? is.made.byRank.get(is.picked?.rank ?? is.made.list[0].rank)[0]
          : neighbour(is.made, is.cursor, ...move);
      drawCursor("hover");
    } else if (event.key === "Enter" && is.cursor !== null) choose(is.made.list[is.cursor].rank);
    else if (event.key === "Escape") choose(null);
    else return;
    event.preventDefault();
  });
}
