"use strict";
// Choose the x axis, hide groups, and follow a live run. Bokeh draws the charts.
const qfleet = {
  axis: "env_steps",

  model(name) {
    return Bokeh.documents[0].get_model_by_name(name);
  },

  charts() {
    return [...document.querySelectorAll("[data-chart]")].map((element) => element.dataset.chart)
      .filter((name) => qfleet.model(`source ${name}`)?.data.env_steps);
  },

  setAxis(button) {
    const axis = qfleet.axis = button.dataset.axis;
    for (const other of document.querySelectorAll("[data-axis]")) {
      other.classList.toggle("on", other === button);
    }
    const fields = { lines: ["xs", axis], band: ["xs", `band_${axis}`], ends: ["x", `end_${axis}`] };
    for (const name of qfleet.charts()) {
      for (const [part, [property, field]] of Object.entries(fields)) {
        const renderer = qfleet.model(`${part} ${name}`);
        for (const kind of ["glyph", "hover_glyph", "nonselection_glyph", "muted_glyph"]) {
          if (renderer[kind]?.[property]) renderer[kind][property] = { field };
        }
      }
      qfleet.model(`axis ${name}`).axis_label = button.dataset.label;
      const hover = qfleet.model(`hover ${name}`);
      hover.tooltips = [hover.tooltips[0], [button.dataset.label, hover.tooltips[1][1]], hover.tooltips[2]];
      qfleet.model(`source ${name}`).change.emit();
    }
    qfleet.model("time").reset();
  },

  setVisible() {
    const boxes = [...document.querySelectorAll("[data-group]")];
    qfleet.model("visible").booleans = boxes.map((box) => box.checked);
  },

  // Columns of arrays arrive as little-endian 32-bit floats in base64.
  decode(column) {
    if (Array.isArray(column)) return column;
    return column.arrays.map((text) => {
      const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
      return new Float32Array(bytes.buffer);
    });
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
        const entries = Object.entries(columns).map(([key, column]) => [key, qfleet.decode(column)]);
        qfleet.model(`source ${name}`).data = Object.fromEntries(entries);
      }
      document.body.dataset.events = Number(document.body.dataset.events || 0) + 1;
    };
    addEventListener("pagehide", () => events.close());
  },
};

document.addEventListener("click", (event) => {
  if (event.target.dataset.axis) qfleet.setAxis(event.target);
});
document.addEventListener("change", (event) => {
  if (event.target.dataset.group) qfleet.setVisible();
});
addEventListener("DOMContentLoaded", () => {
  document.querySelector(`[data-axis=${qfleet.axis}]`)?.classList.add("on");
});
