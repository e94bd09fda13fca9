/**
 * Make elements without markup, so that hostile text stays text.
 *
 * Input: a tag, properties, children (elements or strings). Output: an element. Strings
 * become text nodes; no function here parses HTML.
 */

/**
 * Make an element.
 * `on` maps events to listeners. `style` maps CSS properties to values, which are set
 * through the CSSOM, because the page's policy forbids inline styles. Every other property
 * is an attribute, left out if null or false.
 */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") {
      for (const [kind, listener] of Object.entries(value)) {
        node.addEventListener(kind, listener);
      }
    } else if (name === "style") {
      for (const [key, own] of Object.entries(value)) node.style.setProperty(key, own);
    } else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
}

/** Replace the children of an element; return it. */
export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

/** Set a text if it differs, so that screen readers announce only changes. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Make a table in a box that scrolls sideways.
 * columns: [{head, cell(row) -> string or element, num: right-aligned digits}];
 * rowProps(row): attributes of a row.
 */
export function table(caption, columns, rows, rowProps = () => ({})) {
  const head = columns.map((column) =>
    el("th", { scope: "col", class: column.num ? "num" : null }, column.head),
  );
  const body = rows.map((row) =>
    el(
      "tr",
      rowProps(row),
      columns.map((column, index) =>
        el(
          index ? "td" : "th",
          {
            scope: index ? null : "row",
            class: column.num ? "num" : (column.class ?? null),
          },
          column.cell(row),
        ),
      ),
    ),
  );
  const made = el(
    "table",
    {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, body),
  );
  return el(
    "div",
    {
      class: "scroll",
      tabindex: "0",
      role: "region",
      "aria-label": caption,
    },
    made,
  );
}

/** Make a select element with a visible label. options: [[value, text]]. */
export function choice(label, options, value, onChange) {
  const select = el(
    "select",
    { on: { change: () => onChange(select.value) } },
    options.map(([key, text]) => el("option", { value: key }, text)),
  );
  select.value = value;
  return { box: el("label", { class: "field" }, el("span", {}, label), select), select };
}

/** Replace the options of a select element; keep its value if that still exists. */
export function setOptions(select, options, value) {
  const same =
    options.length === select.options.length &&
    options.every(([key], index) => select.options[index].value === key);
  if (!same)
    fill(
      select,
      options.map(([key, text]) => el("option", { value: key }, text)),
    );
  select.value = value;
}

/** Make a button. */
export function button(text, onClick, props = {}) {
  return el("button", { type: "button", ...props, on: { click: onClick } }, text);
}

/** Make a box that says why there is nothing to show, and what to do. */
export function empty(what, why) {
  return el("div", { class: "empty" }, el("p", { class: "empty-what" }, what), el("p", {}, why));
}
