(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const draw = (holder, name, spec) => drawChart(holder, name, spec, read("style"));

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
