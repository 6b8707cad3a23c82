"use strict";
// Draws a chart of `charts.py` in a holder; used by the report's page and by the board.
const drawChart = (() => {
  const NARROW = 560; // pixels, of a phone
  const styled = (style, width) => (width < NARROW ? { ...style, legend: { ...style.legend, columns: 1 } } : style);
  const options = (name, style, width) => ({
    config: styled(style, width),
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
  return async (holder, name, spec, style) => {
    try {
      const shown = await vegaEmbed(holder, fitted(spec, holder.clientWidth), options(name, style, holder.clientWidth));
      holder.dataset.state = "drawn";
      return shown;
    } catch (error) {
      holder.dataset.state = "failed";
      holder.textContent = `This chart could not be drawn: ${error.message}`;
      throw error;
    }
  };
})();
