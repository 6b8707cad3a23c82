"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const NARROW = 560; // pixels, of a phone
  const styled = (width) => {
    const style = read("style");
    return width < NARROW ? { ...style, legend: { ...style.legend, columns: 1 } } : style;
  };
  const options = (name, width) => ({
    config: styled(width),
    renderer: "svg",
    ast: true,
    downloadFileName: name,
    actions: { export: true, source: false, compiled: false, editor: false },
  });
  // Vega makes room for a title's whole width and takes it from the plot, so lines are kept to the holder's.
  const wrapped = (lines, most) =>
    [].concat(lines).join(" ").split(" ").reduce((found, word) => {
      const line = found.at(-1);
      return line && line.length + word.length < most ? [...found.slice(0, -1), `${line} ${word}`] : [...found, word];
    }, []);
  const fitted = (chart, width) => {
    const columns = (key, value) => (key === "columns" ? Math.max(1, Math.floor((value * (width - 60)) / chart.width)) : value);
    const spec = JSON.parse(JSON.stringify(chart), columns);
    const title = { ...spec.title, text: wrapped(spec.title.text, (width - 60) / 9.6) };
    if (title.subtitle) title.subtitle = wrapped(title.subtitle, (width - 20) / 8.2);
    return { ...spec, title, width: "container" };
  };
  const draw = async (holder, name, spec) => {
    try {
      const shown = await vegaEmbed(holder, fitted(spec, holder.clientWidth), options(name, holder.clientWidth));
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
  const metrics = read("metrics");
  const holder = document.getElementById("explored");
  // A line for each curve, and one for each of its runs (`packed` in curves.py), as rows of points.
  const means = (curve) =>
    curve.m ? curve.s.map((s, i) => ({ s, c: curve.c, m: curve.m[i], n: curve.n[i], l: curve.l?.[i], h: curve.h?.[i] })) : [];
  const seeds = (curve) =>
    curve.v.flatMap((run, k) => run.map((v, i) => ({ s: curve.s[i], c: curve.c, v, k })).filter((row) => row.v !== null));
  const unpacked = (chart) => ({
    ...chart,
    data: { values: chart.data.flatMap(means) },
    layer: chart.layer.map((one) => (one.data === "seeds" ? { ...one, data: { values: chart.data.flatMap(seeds) } } : one)),
  });
  let last = null;
  const show = async () => {
    if (last) last.finalize();
    last = await draw(holder, explorer.value, unpacked(metrics[explorer.value]));
  };
  explorer.addEventListener("change", show);
  show();
})();
