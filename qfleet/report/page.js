"use strict";
// Draw charts as they come into view, choose the x axis, hide groups, and follow a live run.
const qfleet = {
  axis: { name: "env_steps", label: "env steps" },
  charts: new Map(), // name of a chart that is drawn → its Bokeh document
  newest: new Map(), // name of a chart → its newest columns, also before it is drawn

  async draw(element) {
    const name = element.dataset.chart;
    const script = element.querySelector("script");
    element.id = `chart-${name}`;
    const [view] = await Bokeh.embed.embed_item(JSON.parse(script.textContent), element.id);
    const document_ = view.model.document;
    qfleet.charts.set(name, document_);
    if (qfleet.newest.has(name)) qfleet.fill(name);
    if (qfleet.axis.name !== "env_steps") qfleet.showAxis(document_);
    qfleet.showVisible(document_);
    if (qfleet.isOverTime(document_)) qfleet.link(view.model);
    element.dataset.drawn = "";
  },

  isOverTime(document_) {
    return Boolean(document_.get_model_by_name("source")?.data.env_steps);
  },

  // Charts over time zoom together.
  link(plot) {
    const others = () => [...qfleet.charts.values()].filter(qfleet.isOverTime)
      .map((document_) => document_.roots()[0]).filter((other) => other !== plot);
    plot.on_event("rangesupdate", ({ x0, x1 }) => {
      for (const other of others()) other.x_range.setv({ start: x0, end: x1 });
    });
    plot.on_event("reset", () => {
      for (const other of others()) other.x_range.reset();
    });
  },

  setAxis(button) {
    qfleet.axis = { name: button.dataset.axis, label: button.dataset.label };
    for (const other of document.querySelectorAll("[data-axis]")) {
      other.classList.toggle("on", other === button);
    }
    for (const document_ of qfleet.charts.values()) qfleet.showAxis(document_);
  },

  showAxis(document_) {
    if (!qfleet.isOverTime(document_)) return;
    const { name, label } = qfleet.axis;
    const fields = { lines: ["xs", name], band: ["xs", `band_${name}`], ends: ["x", `end_${name}`] };
    for (const [part, [property, field]] of Object.entries(fields)) {
      const renderer = document_.get_model_by_name(part);
      for (const kind of ["glyph", "hover_glyph"]) {
        if (renderer?.[kind]?.[property]) renderer[kind][property] = { field };
      }
    }
    document_.get_model_by_name("axis").axis_label = label;
    const hover = document_.get_model_by_name("hover");
    const [title, [, x], y] = hover.tooltips;
    hover.tooltips = [title, [label, x], y];
    document_.get_model_by_name("source").change.emit();
    document_.roots()[0].x_range.reset();
  },

  showVisible(document_) {
    const boxes = [...document.querySelectorAll("[data-group]")];
    const visible = document_.get_model_by_name("visible");
    if (visible && boxes.some((box, k) => box.checked !== visible.booleans[k])) {
      visible.booleans = boxes.map((box) => box.checked);
    }
  },

  // Arrays arrive as little-endian floats of 32 or 64 bits in base64.
  decode(column) {
    if (Array.isArray(column)) return column;
    return column.arrays.map((text) => {
      const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
      return column.bits === 64 ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
    });
  },

  fill(name) {
    const entries = Object.entries(qfleet.newest.get(name));
    const columns = entries.map(([key, column]) => [key, qfleet.decode(column)]);
    qfleet.charts.get(name).get_model_by_name("source").data = Object.fromEntries(columns);
  },

  follow(url) {
    const events = new EventSource(url);
    const state = document.getElementById("connection");
    events.onopen = () => { state.textContent = "live"; };
    events.onerror = () => { state.textContent = "not connected; trying again …"; };
    events.onmessage = (event) => {
      const { reload, html = {}, sources = {} } = JSON.parse(event.data);
      if (reload) {
        events.close();
        location.reload();
        return;
      }
      for (const [id, text] of Object.entries(html)) document.getElementById(id).innerHTML = text;
      for (const [name, columns] of Object.entries(sources)) {
        qfleet.newest.set(name, columns);
        if (qfleet.charts.has(name)) qfleet.fill(name);
      }
      document.body.dataset.events = Number(document.body.dataset.events || 0) + 1;
    };
    addEventListener("pagehide", () => events.close());
  },
};

document.addEventListener("click", ({ target }) => {
  const { axis, all, group } = target.dataset;
  if (axis) qfleet.setAxis(target);
  if (all !== undefined) {
    for (const box of document.querySelectorAll("[data-group]")) box.checked = Boolean(all);
  }
  if (all === undefined && group === undefined) return;
  for (const document_ of qfleet.charts.values()) qfleet.showVisible(document_);
});
addEventListener("DOMContentLoaded", () => {
  document.querySelector("[data-axis=env_steps]")?.classList.add("on");
  let drawn = Promise.resolve();
  const inView = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      inView.unobserve(target);
      // One by one, with a frame in between: the first chart can be used while others are drawn.
      drawn = drawn.then(() => qfleet.draw(target)).then(() => new Promise(requestAnimationFrame));
    }
  });
  for (const element of document.querySelectorAll("[data-chart]")) inView.observe(element);
});
