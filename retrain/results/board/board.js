"use strict";
// Every text from a run becomes a text node or an attribute that holds text; nothing here makes markup of it.
(() => {
  const TABS = {
    runs: "Runs", curves: "Curves", decisions: "Decisions", pressure: "Back pressure", engines: "Permits and engines",
    rollouts: "Rollouts", notices: "Notices and failures",
  };
  const AXES = ["steps", "tokens", "rollouts", "seconds", "usd"];
  const EVERY_MS = 1000, HIDDEN_MS = 15000, FEW_RUNS = 40, FEW_CONDITIONS = 7;
  const $ = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let style = null; // of charts

  // The address line's tokens go to this tab's own storage, so that they are in no history.
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has("token")) {
    sessionStorage.setItem("token", given.get("token"));
    sessionStorage.setItem("change", given.get("change") ?? "");
    history.replaceState(null, "", "#/");
  }
  const mayChange = () => Boolean(sessionStorage.getItem("change"));

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };
  const ask = async (path, parameters = {}, method = "GET") => {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(parameters)) for (const one of [].concat(value)) query.append(name, one);
    const headers = { authorization: `Bearer ${sessionStorage.getItem("token") ?? ""}` };
    if (method === "POST") headers["x-change-token"] = sessionStorage.getItem("change");
    const response = await fetch(`/api/${path}?${query}`, { method, headers });
    if (response.status === 204) return null;
    const body = await response.json();
    if (!response.ok) throw new Error(body.error);
    return body;
  };
  const pathOf = (what, id) => `${what}/${encodeURIComponent(id)}`;
  const tell = (problem) => {
    $("problem").textContent = problem;
    $("problem").hidden = !problem;
  };
  const isNumber = (column) => column.startsWith(">");
  const head = (column) => (isNumber(column) ? column.slice(1) : column);

  // A table whose rows are kept by key, so that an update touches what changed only.
  class Table {
    constructor(columns, link = null) {
      this.link = link; // of the first cell, by key
      this.rows = new Map();
      this.body = make("tbody");
      this.columns = columns;
      const heads = columns.map((column) => make("th", { scope: "col", class: isNumber(column) && "number" }, head(column)));
      this.element = make("div", { class: "table" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), this.body));
    }
    set(key, cells) {
      const row = make("tr", {}, ...cells.map((cell, place) => {
        const column = this.columns[place];
        const state = head(column) === "state" && cell.split(" ")[0];
        const shown = place === 0 && this.link ? make("a", { href: this.link(key) }, cell) : cell;
        return make("td", { class: isNumber(column) && "number", "data-head": head(column), "data-state": state }, shown);
      }));
      row.hidden = this.rows.get(key)?.hidden ?? false;
      if (this.rows.has(key)) this.rows.get(key).replaceWith(row);
      else this.body.append(row);
      this.rows.set(key, row);
    }
    order(keys) {
      for (const [key, row] of this.rows) if (!keys.includes(key)) { row.remove(); this.rows.delete(key); }
      const present = [...this.body.children];
      if (keys.some((key, place) => this.rows.get(key) !== present[place])) this.body.append(...keys.map((key) => this.rows.get(key)));
    }
  }
  const tableOf = ({ columns, rows }) => {
    const table = new Table(columns);
    rows.forEach((row, number) => table.set(number, row));
    return table.element;
  };

  // Charts, each in a figure of its own that is exchanged when its successor is drawn.
  const NIGHT = { "#000000": "#ffffff", "#1a1a1a": "#e8e8e8", "#444444": "#a8adb3", "#e4e4e4": "#363b41", white: "transparent" };
  const recoloured = (value) => {
    if (!dark.matches) return value;
    return JSON.parse(JSON.stringify(value), (key, one) => (typeof one === "string" && one in NIGHT && key !== "c" ? NIGHT[one] : one));
  };
  let library = null; // it is large, so tables need not wait for it
  const vega = () => (library ??= new Promise((loaded, failed) => {
    document.head.append(make("script", { src: "/vega.js", onload: loaded, onerror: () => failed(new Error("The charts could not be loaded.")) }));
  }));
  class Charts {
    constructor() {
      this.element = make("div");
      this.figures = new Map();
      this.last = [];
    }
    async draw(charts) {
      this.last = charts;
      const names = charts.map((chart) => chart.name);
      for (const [name, figure] of this.figures) if (!names.includes(name)) { figure.shown?.finalize(); figure.element.remove(); this.figures.delete(name); }
      style ??= await ask("style/all");
      await vega();
      for (const { name, spec } of charts) {
        if (!this.figures.has(name)) this.figures.set(name, { element: make("figure"), shown: null });
        const figure = this.figures.get(name), coming = make("div", { class: "chart coming", "data-chart": name });
        this.element.append(figure.element);
        figure.element.append(coming);
        const shown = await drawChart(coming, name, recoloured(spec), recoloured(style));
        figure.shown?.finalize();
        coming.classList.remove("coming");
        figure.element.replaceChildren(coming);
        figure.shown = shown;
      }
    }
  }
  let drawnCharts = null;
  dark.addEventListener("change", () => drawnCharts?.draw(drawnCharts.last));

  // One view at a time asks for news; `poll` returns when to ask again, in ms.
  let view = 0;
  const follow = async (poll) => {
    const mine = view;
    while (mine === view) {
      let wait = EVERY_MS;
      try {
        wait = (await poll()) ?? EVERY_MS;
        if (mine === view) tell("");
      } catch (error) {
        if (mine === view) tell(error.message === "Failed to fetch" ? "The board does not answer; it may have ended." : error.message);
        wait = 3000;
      }
      await new Promise((resume) => setTimeout(resume, document.hidden ? Math.max(HIDDEN_MS, wait) : wait));
    }
  };

  const showList = () => {
    document.title = "retrain board";
    const holder = make("div");
    let table = null, since = 0;
    $("main").replaceChildren(make("h1", {}, "Campaigns"), holder);
    follow(async () => {
      const news = await ask("campaigns/all", { since });
      if (!news) return;
      since = news.version;
      if (!table) {
        table = new Table(news.columns, (id) => `#/c/${encodeURIComponent(id)}/runs`);
        holder.replaceChildren(table.element);
      }
      for (const [id, row] of Object.entries(news.rows)) table.set(id, row);
      table.order(news.order);
      if (!news.order.length) holder.replaceChildren(make("p", {}, "No campaigns yet; start one with: retrain FILE.toml"));
      else if (!table.element.isConnected) holder.replaceChildren(table.element);
      vega();
      if (news.problem) throw new Error(news.problem);
    });
  };

  const confirmed = (title, command, yes) =>
    new Promise((settle) => {
      $("asks").textContent = title;
      $("command").textContent = command;
      $("confirmed").textContent = yes;
      const dialog = $("confirm");
      dialog.returnValue = "no";
      dialog.addEventListener("close", () => settle(dialog.returnValue === "yes"), { once: true });
      dialog.showModal();
    });

  const showCampaign = (id, tab, query) => {
    document.title = `${id} - retrain board`;
    const progress = make("progress", { "aria-label": "steps done" }), counts = make("span", { class: "note" });
    const state = make("span"), lines = make("div"), buttons = make("p", { class: "buttons" }), said = make("pre", { hidden: true });
    const tabs = Object.entries(TABS).map(([name, title]) =>
      make("a", { href: `#/c/${encodeURIComponent(id)}/${name}`, "aria-current": name === tab && "page" }, title));
    const content = make("section", { "aria-label": TABS[tab] });
    $("main").replaceChildren(make("h1", {}, id), make("p", {}, state, " ", progress, " ", counts), lines, buttons, said,
      make("nav", { class: "tabs", "aria-label": "Parts" }, ...tabs), content);
    let since = 0, told = null, part = null;
    const act = async (action, title, command) => {
      if (!(await confirmed(title, command, title.replace("?", "")))) return;
      said.hidden = false;
      said.textContent = `${command} ...`;
      try {
        const answer = await ask(pathOf("act", id), { action }, "POST");
        said.textContent = [...answer.lines, ...(answer.code ? [`exit code ${answer.code}`] : [])].join("\n");
      } catch (error) {
        said.textContent = error.message;
      }
    };
    const button = (title, action, command) => make("button", { type: "button", onclick: () => act(action, title, command) }, title.replace("?", ""));
    follow(async () => {
      const news = await ask(pathOf("campaign", id), { since });
      if (news) {
        since = news.version;
        state.textContent = news.state;
        state.dataset.state = news.state;
        progress.max = news.total ?? 1;
        progress.value = news.total ? news.done : 0;
        counts.textContent = `${news.done.toLocaleString("en")} of ${news.total?.toLocaleString("en") ?? "?"} steps`;
        lines.replaceChildren(...news.lines.map((line) => make("p", { class: "note" }, line)),
          ...(news.problem ? [make("p", { class: "problem" }, news.problem)] : []),
          ...(news.resume_with ? [make("p", {}, "continue with: ", make("code", {}, news.resume_with))] : []));
        const offered = JSON.stringify([news.can_stop, news.resume_with]);
        if (mayChange() && offered !== told) {
          told = offered;
          buttons.replaceChildren(...(news.can_stop
            ? [button("Stop?", "stop", `retrain stop ${id}`), button("Stop now?", "stop now", `retrain stop ${id} --now`)] : []),
            ...(news.resume_with ? [button("Resume?", news.resume_with.endsWith(" --failed") ? "resume failed" : "resume",
              `${news.resume_with} --detach`)] : []));
        }
        if (!part) {
          part = PARTS[tab](id, news, query);
          content.replaceChildren(part.element);
        }
        part.news?.(news);
      }
      const wait = await part.poll?.();
      return wait ?? EVERY_MS;
    });
  };

  // The conditions that charts show: as many as are drawn at once without waiting, until others are chosen.
  const chooser = (news, changed) => {
    const counts = new Map(news.conditions.map((name) => [name, 0]));
    for (const name of news.of ?? []) counts.set(name, counts.get(name) + 1);
    const chosen = new Set();
    let runs = 0;
    for (const [name, count] of counts) {
      if (chosen.size && (runs + count > FEW_RUNS || chosen.size >= FEW_CONDITIONS)) break;
      chosen.add(name);
      runs += count;
    }
    const title = make("summary");
    const label = () => (title.textContent = `Conditions: ${chosen.size} of ${counts.size}`);
    const boxes = [...counts.keys()].map((name) => make("label", {}, make("input", {
      type: "checkbox", checked: chosen.has(name),
      onchange: (event) => { event.target.checked ? chosen.add(name) : chosen.delete(name); label(); changed(); },
    }), ` ${name}`));
    label();
    return { chosen: () => [...chosen], element: make("details", { open: counts.size > 1 && counts.size <= FEW_CONDITIONS }, title, make("div", { class: "choices" }, ...boxes)) };
  };
  const select = (label, options, value, changed, none = "") => {
    const element = make("select", { onchange: changed }, ...options.map((one) => make("option", { value: one, selected: one === value }, one || none)));
    return { value: () => element.value, element: make("label", {}, `${label} `, element), select: element };
  };

  const drawn = (what, id, news, controls, parameters) => {
    let digest = "", next = 0, choices = 0;
    const again = () => { digest = ""; next = 0; choices += 1; };
    const choice = chooser(news, again), charts = new Charts(), words = make("div");
    drawnCharts = charts;
    return {
      again,
      element: make("div", {}, make("div", { class: "controls" }, ...controls), choice.element, charts.element, words),
      poll: async () => {
        if (performance.now() < next) return Math.min(EVERY_MS, Math.max(50, next - performance.now()));
        if (!choice.chosen().length) { await charts.draw([]); return; }
        next = performance.now() + EVERY_MS;
        const asked = choices, answer = await ask(pathOf(what, id), { condition: choice.chosen(), have: digest, ...parameters() });
        if (asked !== choices) return 0; // another choice was made meanwhile
        if (answer.digest) {
          digest = answer.digest;
          await charts.draw(answer.charts);
          words.replaceChildren(...answer.lines.map((line) => make("p", { class: "note" }, line)), ...answer.tables.map(tableOf),
            ...answer.texts.flatMap(({ title, lines }) => [make("h3", {}, title), make("pre", {}, lines.join("\n"))]));
        }
        next = performance.now() + 1000 * answer.again_s;
      },
    };
  };

  // What a policy wrote, each token over its advantage's colour: blue pushes it up, orange down.
  const coloured = (text, spans, most) => {
    const holder = make("pre");
    if (!spans.length) return make("pre", {}, text || "(empty)");
    const characters = [...text]; // as Python counts them
    let at = 0;
    for (const [count, advantage] of spans) {
      const piece = make("span", {}, characters.slice(at, at + count).join(""));
      at += count;
      if (advantage) {
        const share = Math.round(12 + 48 * Math.min(1, Math.abs(advantage) / most));
        piece.style.backgroundColor = `color-mix(in srgb, ${advantage > 0 ? "#3b8fd9" : "#e07b28"} ${share}%, transparent)`;
        if (advantage < 0) piece.style.textDecoration = "underline dotted";
        piece.title = `advantage ${advantage > 0 ? "+" : ""}${advantage}`;
      }
      holder.append(piece);
    }
    holder.append(characters.slice(at).join(""));
    return holder;
  };
  const short = (number) => (number === null ? "none" : Number(number.toPrecision(4)).toString());
  const rolloutOf = (sample) => {
    const chip = (text, sign = false) => make("span", { class: sign && "sign" }, text);
    const parts = Object.entries(sample.parts).map(([name, value]) => chip(`${name} ${short(value)}`));
    const spans = [sample.token_advantages, ...sample.turns.map((turn) => turn.token_advantages)];
    const most = Math.max(1e-9, ...spans.flat().map(([, advantage]) => Math.abs(advantage ?? 0)));
    const said = (kind, who, text) => make("li", { class: kind }, make("span", {}, who), typeof text === "string" ? make("pre", {}, text || "(empty)") : text);
    const talk = [said("given", "prompt", sample.prompt)];
    if (!sample.turns.length) talk.push(said("policy", "completion", coloured(sample.completion, sample.token_advantages, most)));
    sample.turns.forEach((turn, number) => {
      const reward = turn.reward === null ? "" : `, reward ${short(turn.reward)}`;
      talk.push(said("policy", `turn ${number + 1}${reward}${turn.cut ? ", cut at max_turn_tokens" : ""}`, coloured(turn.policy, turn.token_advantages, most)));
      if (turn.environment) talk.push(said("given", "observation", turn.environment));
    });
    if (sample.unscored && !sample.error) talk.push(said("failed", "unscored", sample.unscored));
    if (sample.error) talk.push(said("failed", "failed", sample.error));
    return make("article", { class: "rollout" },
      make("h3", {}, `${sample.run}, step ${sample.step}, prompt ${sample.prompt_id ?? "?"}${sample.evaluation ? ` of ${sample.evaluation}` : ""}`),
      make("div", { class: "chips" }, chip(`reward ${short(sample.reward)}`), ...parts,
        ...(sample.advantage === null ? [] : [chip(`advantage ${short(sample.advantage)}`)]),
        ...(sample.tokens === null ? [] : [chip(`${sample.tokens} tokens`)]), ...(sample.source ? [chip(`source ${sample.source}`)] : []),
        ...sample.extent.map((text) => chip(text)), ...(sample.tie ? [chip("tie: no learning signal")] : []),
        ...(sample.truncated ? [chip("truncated", true)] : []), ...sample.signs.map((text) => chip(text, true))),
      make("ol", { class: "talk" }, ...talk), sample.answer ? make("p", { class: "note" }, `answer: ${sample.answer}`) : null);
  };

  const PARTS = {
    runs: (id) => {
      let table = null, names = [];
      const holder = make("div"), filter = make("input", { type: "search", placeholder: "name or state", oninput: () => sift() });
      const sift = () => {
        const wanted = filter.value.toLowerCase().split(" ");
        for (const row of table.rows.values()) row.hidden = !wanted.every((word) => row.textContent.toLowerCase().includes(word));
      };
      return {
        element: make("div", {}, make("p", { class: "controls" }, make("label", {}, "Show only ", filter)), holder),
        news: (news) => {
          if (news.whole) {
            names = news.run_ids;
            table = new Table(news.columns, (number) => `#/c/${encodeURIComponent(id)}/rollouts?run=${encodeURIComponent(names[number])}`);
            holder.replaceChildren(table.element);
          }
          for (const [number, row] of Object.entries(news.rows)) table.set(Number(number), row);
          if (filter.value) sift();
        },
      };
    },
    curves: (id, news, query) => {
      const metric = select("Metric", ["mean_reward"], "mean_reward", () => part.again());
      const per = select("along", AXES, "steps", () => part.again());
      ask(pathOf("metrics", id)).then((names) => {
        const wanted = query.get("metric") ?? metric.value();
        metric.select.replaceChildren(...names.map((one) => make("option", { value: one, selected: one === wanted }, one)));
        if (wanted !== "mean_reward") part.again();
      }, (error) => tell(error.message));
      const part = drawn("curves", id, news, [metric.element, per.element], () => ({ metric: metric.value(), per: per.value() }));
      return part;
    },
    pressure: (id, news) => drawn("pressure", id, news, [], () => ({})),
    engines: (id, news) => drawn("engines", id, news, [], () => ({})),
    decisions: (id) => {
      const element = make("div");
      return {
        element,
        news: async () => {
          const { lines, tables } = await ask(pathOf("decisions", id));
          element.replaceChildren(...lines.map((line) => make("p", {}, line)),
            ...tables.flatMap(({ title, ...table }) => [make("h3", {}, title), tableOf(table)]));
        },
      };
    },
    notices: (id) => {
      const failed = make("div"), told = make("div"), folds = new Map();
      const fold = (run) => {
        const output = make("pre");
        const details = make("details", { ontoggle: async () => {
          if (!details.open) return;
          try {
            output.textContent = (await ask(pathOf("log", id), { run: run.id })).lines.join("\n") || "no output";
          } catch (error) {
            output.textContent = error.message;
          }
        } }, make("summary", {}, "last lines of its log"), output);
        return make("div", {}, make("h3", {}, run.name, " ", make("span", { "data-state": run.state }, run.state)), make("p", {}, run.message), details);
      };
      return {
        element: make("div", {}, make("h2", {}, "Failures"), failed, make("h2", {}, "Notices and events"), told),
        news: async () => {
          const { failures, notices } = await ask(pathOf("notices", id));
          const shown = failures.map((run) => {
            const key = JSON.stringify(run);
            if (!folds.has(key)) folds.set(key, fold(run));
            return folds.get(key);
          });
          failed.replaceChildren(...(shown.length ? shown : [make("p", { class: "note" }, "None.")]));
          told.replaceChildren(tableOf({ columns: ["when (UTC)", "what", "run", "text"], rows: notices }));
        },
      };
    },
    rollouts: (id, news, query) => {
      const runs = news.run_ids, holder = make("div"), told = make("p", { class: "note" }), signs = make("div");
      let have = "", next = 0, choices = 0;
      const again = () => { have = ""; next = 0; choices += 1; };
      const run = select("Run", runs, query.get("run") ?? runs[0], again), against = select("beside", ["", ...runs], "", again, "no other");
      const of = select("Rollouts of", ["training", "held-out"], "training", again);
      const source = select("from source", [""], "", again);
      const field = (label, attributes) => {
        const input = make("input", { ...attributes, onchange: again });
        return { input, element: make("label", {}, `${label} `, input) };
      };
      const least = field("reward from", { type: "number", step: "any" }), most = field("to", { type: "number", step: "any" });
      const cut = field("truncated", { type: "checkbox" }), cheats = field("signs of cheating", { type: "checkbox" });
      const controls = [run, against, of, source, least, most, cut, cheats].map((one) => one.element);
      return {
        element: make("div", {}, make("div", { class: "controls" }, ...controls), told, signs, holder),
        poll: async () => {
          if (!runs.length || performance.now() < next) return;
          next = performance.now() + EVERY_MS;
          const parameters = { run: run.value(), against: against.value(), of: of.value(), source: source.value(), have,
            least: least.input.value, most: most.input.value };
          if (cut.input.checked) parameters.truncated = 1;
          if (cheats.input.checked) parameters.signs = 1;
          const asked = choices, answer = await ask(pathOf("rollouts", id), parameters);
          if (asked !== choices) return 0;
          next = performance.now() + 1000 * answer.again_s;
          if (!answer.digest) return;
          have = answer.digest;
          if (source.select.options.length !== answer.sources.length + 1) {
            source.select.replaceChildren(...["", ...answer.sources].map((one) => make("option", { value: one }, one || "any")));
          }
          source.element.hidden = !answer.sources.length;
          const what = against.value() ? `${answer.found} prompts that both have` : `${answer.found} of ${answer.kept} kept rollouts`;
          const first = answer.found > answer.groups.length ? `, the first ${answer.groups.length} are shown` : "";
          told.textContent = `${what}${first}. Colour is a token's advantage: blue raises it, orange with dots lowers it.`;
          signs.replaceChildren(...answer.signs.map((line) => make("p", { class: "problem" }, line)));
          holder.replaceChildren(...answer.groups.map((group) => make("div", { class: group.length > 1 ? "pair" : "" }, ...group.map(rolloutOf))));
        },
      };
    },
  };

  const show = () => {
    view += 1;
    tell("");
    drawnCharts = null;
    const [path, query] = location.hash.slice(1).split("?");
    const [, kind, id, tab] = path.split("/").map((part) => decodeURIComponent(part));
    $("path").replaceChildren(make("a", { href: "#/" }, "retrain board"), ...(kind === "c" ? [` / ${id}`] : []));
    if (!sessionStorage.getItem("token")) tell("Open the address that `retrain board` printed: it holds the token.");
    else if (kind === "c") showCampaign(id, tab in TABS ? tab : "runs", new URLSearchParams(query));
    else showList();
  };
  $("skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
  addEventListener("hashchange", show);
  show();
})();
