"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const options = (name) => ({
    renderer: "svg",
    ast: true,
    downloadFileName: name,
    actions: { export: true, source: false, compiled: false, editor: false },
  });
  const NARROW = 560, NAMES = 92; // pixels: of a phone, and what names at the ends of lines get there
  // Vega makes room for a title's whole width and takes it from the plot, so lines are kept to the holder's.
  const wrapped = (lines, most) =>
    [].concat(lines).join(" ").split(" ").reduce((found, word) => {
      const line = found.at(-1);
      return line && line.length + word.length < most ? [...found.slice(0, -1), `${line} ${word}`] : [...found, word];
    }, []);
  const fitted = (spec, width) => {
    const title = { ...spec.title, text: wrapped(spec.title.text, (width - 60) / 9.6) };
    if (title.subtitle) title.subtitle = wrapped(title.subtitle, (width - 20) / 8.2);
    const padding = width < NARROW ? { ...spec.padding, right: Math.min(spec.padding.right, NAMES) } : spec.padding;
    return { ...spec, title, padding, width: "container" };
  };
  const draw = async (holder, name, spec) => {
    try {
      const shown = await vegaEmbed(holder, fitted(spec, holder.clientWidth), options(name));
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
    curves.filter(({ m }) => m.some((mean) => mean !== null)).flatMap(({ c, s, m, l, h, n }) =>
      s.map((step, i) => ({ c: conditions[c], s: step, m: m[i], l: l[i], h: h[i], n: n.length ? n[i] : 1 })),
    );
  const seeds = (curves) =>
    curves.flatMap(({ c, s, e }) =>
      e.flatMap((values, k) =>
        values.flatMap((v, i) => (v === null ? [] : [{ c: conditions[c], s: s[i], v, k }])),
      ),
    );
  const lastStep = template.encoding.x.scale.domainMax;
  const show = async () => {
    const { label, title, subtitle, domain, sparse, curves, ends } = metrics[explorer.value];
    const spec = JSON.parse(JSON.stringify(template).replaceAll(placeholder, JSON.stringify(label)));
    spec.title.text = title;
    spec.title.subtitle = subtitle;
    spec.data.values = rows(curves);
    if (!curves.some(({ l }) => l.length)) spec.layer = spec.layer.filter(({ name }) => name !== "band");
    const named = (name) => spec.layer.find((layer) => layer.name === name);
    named("seeds").data.values = seeds(curves);
    if (named("ends")) named("ends").data.values = ends.map((end) => ({ ...end, s: lastStep }));
    const empty = ({ data }) => !(data || spec.data).values.length;
    const line = named("line");
    line.encoding.y.scale.domain = domain;
    line.mark.point = sparse && { filled: true, size: 28 };
    spec.layer = spec.layer.filter((layer) => !empty(layer)); // Vega warns of layers without data
    if (last) last.finalize();
    last = await draw(holder, explorer.value, spec);
  };
  explorer.addEventListener("change", show);
  show();
})();
