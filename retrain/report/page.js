"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const options = (name) => ({
    renderer: "svg",
    ast: true,
    downloadFileName: name,
    actions: { export: true, source: false, compiled: false, editor: false },
  });
  const draw = async (holder, name, spec) => {
    try {
      const shown = await vegaEmbed(holder, { ...spec, width: "container" }, options(name));
      holder.dataset.state = "drawn";
      return shown;
    } catch (error) {
      holder.dataset.state = "failed";
      holder.textContent = `This chart could not be drawn: ${error.message}`;
      throw error;
    }
  };

  const charts = read("charts");
  for (const holder of document.querySelectorAll("[data-chart]")) {
    draw(holder, holder.dataset.chart, charts[holder.dataset.chart]);
  }

  const explorer = document.getElementById("metric");
  if (!explorer) return;
  const { template, metrics, conditions, label: marker } = read("metrics");
  const placeholder = JSON.stringify(marker);
  const holder = document.getElementById("explored");
  let last = null;
  const rows = (curves) =>
    curves.flatMap(({ c, s, m, l, h, n }) =>
      s.map((step, i) => ({ c: conditions[c], s: step, m: m[i], l: l[i], h: h[i], n: n.length ? n[i] : 1 })),
    );
  const show = async () => {
    const { label, title, subtitle, domain, sparse, curves } = metrics[explorer.value];
    const spec = JSON.parse(JSON.stringify(template).replaceAll(placeholder, JSON.stringify(label)));
    spec.title.text = title;
    spec.title.subtitle = subtitle;
    spec.data.values = rows(curves);
    if (!curves.some(({ l }) => l.length)) spec.layer = spec.layer.filter(({ mark }) => mark.type !== "area");
    const line = spec.layer.find(({ mark }) => mark.type === "line");
    line.encoding.y.scale.domain = domain;
    line.mark.point = sparse && { filled: true, size: 28 };
    if (last) last.finalize();
    last = await draw(holder, explorer.value, spec);
  };
  explorer.addEventListener("change", show);
  show();
})();
