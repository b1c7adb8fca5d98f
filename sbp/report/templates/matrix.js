// Modules or operators x placements of one tensor: each trial is in exactly one cell.

const FIRST = '(first input)';

class Matrix {
  constructor(app) {
    this.app = app;
    this.data = app.data;
    this.expanded = new Set();
    this.limit = 250;
    this.element = make('div', { class: 'matrix' });
    this.element.addEventListener('click', (event) => this.click(event));
    this.element.addEventListener('keydown', (event) => this.key(event));
    this.element.addEventListener('mouseover', (event) => this.hover(event.target.closest('button.cell')));
    this.element.addEventListener('focusin', (event) => this.hover(event.target.closest('button.cell')));
    this.element.addEventListener('mouseleave', () => tip.hide());
    this.element.addEventListener('focusout', () => tip.hide());
  }

  get tensor() { return this.app.filters.get('by') || FIRST; }

  // Looked up once for each choice of columns; null for trials without that tensor.
  placement(trial) {
    if (this.placedBy !== this.tensor) {
      this.placedBy = this.tensor;
      this.placed = new Array(this.data.size);
    }
    if (this.placed[trial] === undefined) this.placed[trial] = this.lookUp(trial);
    return this.placed[trial];
  }

  lookUp(trial) {
    const { data } = this;
    const name = this.tensor === FIRST ? data.firstTensor(trial) : this.tensor;
    if (this.tensor !== FIRST && !data.case(trial).tensors.includes(name)) return null;
    const sbp = name === undefined ? 'B' : data.placement(trial, name).replaceAll(' ', '');
    const axes = data.group(trial).mesh.split('x').length;
    return sbp === 'B' && axes > 1 ? `(${Array(axes).fill('B').join(',')})` : sbp;
  }

  render(trials) {
    const { data } = this;
    this.cells = new Map();
    const rows = new Map();
    const columns = new Set();
    let elsewhere = 0;
    for (const trial of trials) {
      const sbp = this.placement(trial);
      if (sbp === null) { elsewhere += 1; continue; }
      columns.add(sbp);
      const one = data.case(trial);
      const key = `${one.suite}\n${one.short}`;
      if (!rows.has(key)) rows.set(key, { key, name: one.short, suite: one.suite, cells: new Map(), cases: new Map(), bad: 0, known: 0, all: 0 });
      const row = rows.get(key);
      this.put(row, sbp, trial);
      if (!row.cases.has(one.name)) row.cases.set(one.name, { key: `${key}\n${one.name}`, name: one.name, suite: one.suite, cells: new Map(), cases: new Map(), bad: 0, known: 0, all: 0 });
      this.put(row.cases.get(one.name), sbp, trial);
    }
    const ordered = [...rows.values()].sort(this.order());
    const heads = [...columns].sort(comparePlacements);
    if (ordered.length === 1) this.expanded.add(ordered[0].key);
    const shown = ordered.slice(0, this.limit);
    const left = ordered.length - shown.length;
    this.element.replaceChildren(...[
      this.controls(elsewhere),
      ordered.length ? this.table(shown, heads, ordered.length) : make('p', { class: 'empty' }, 'No trial passes the filters.'),
      left > 0 ? make('button', { type: 'button', class: 'quiet more', onclick: () => { this.limit += 1000; this.app.refresh(); } }, `Show ${left} more rows`) : null,
      this.legend(trials),
    ].filter(Boolean));
    return this.element;
  }

  put(row, sbp, trial) {
    if (!row.cells.has(sbp)) row.cells.set(sbp, []);
    row.cells.get(sbp).push(trial);
    row.all += 1;
    if (this.data.unexpected(trial)) row.bad += 1;
    else if (this.data.failed(trial)) row.known += 1;
  }

  order() {
    const byName = (one, other) => one.suite.localeCompare(other.suite) || one.name.localeCompare(other.name);
    const sort = this.app.filters.get('sort');
    if (sort === 'name') return byName;
    if (sort === 'share') return (one, other) => (other.bad + other.known) / other.all - (one.bad + one.known) / one.all || byName(one, other);
    return (one, other) => other.bad - one.bad || other.known - one.known || byName(one, other);
  }

  controls(elsewhere) {
    const { data, app } = this;
    const uses = new Map();
    for (const one of data.cases) for (const name of one.tensors) uses.set(name, (uses.get(name) || 0) + 1);
    const names = [...uses].sort((one, other) => other[1] - one[1]).slice(0, 60).map(([name]) => name);
    if (this.tensor !== FIRST && !names.includes(this.tensor)) names.unshift(this.tensor);
    const by = make('select', { id: 'by' }, make('option', { value: '' }, 'the first input'), names.map((value) => make('option', { value }, value)));
    by.value = this.tensor === FIRST ? '' : this.tensor;
    by.addEventListener('change', () => { app.filters.set({ by: by.value, cell: '' }); app.refresh(); document.getElementById('by').focus(); });
    const sort = make('select', { id: 'sort' }, [['', 'most failures'], ['share', 'largest share of failures'], ['name', 'name']].map(([value, text]) => make('option', { value }, text)));
    sort.value = app.filters.get('sort');
    sort.addEventListener('change', () => { app.filters.set({ sort: sort.value }); app.refresh(); document.getElementById('sort').focus(); });
    return make(
      'div', { class: 'controls' },
      make('label', {}, 'Columns: placement of ', by), make('label', {}, 'Sort by ', sort),
      elsewhere ? make('span', { class: 'muted' }, `${plural(elsewhere, 'trial')} without this tensor left out`) : null,
    );
  }

  table(rows, heads, total) {
    const meshes = heads.map((sbp) => (sbp.startsWith('(') ? splitPlacement(sbp).length : 1));
    const groups = [];
    meshes.forEach((axes) => {
      const last = groups[groups.length - 1];
      if (last && last.axes === axes) last.span += 1;
      else groups.push({ axes, span: 1 });
    });
    const starts = heads.map((_, at) => at > 0 && meshes[at] !== meshes[at - 1]);
    const head = make('thead', {});
    if (groups.length > 1) {
      head.append(make('tr', { class: 'mesh-row' }, make('td', {}), groups.map((group) => make('th', { colspan: group.span, scope: 'colgroup' }, `mesh of ${group.axes} ax${group.axes > 1 ? 'es' : 'is'}`)), make('td', {})));
    }
    head.append(make(
      'tr', { class: 'sbp-row' },
      make('th', { scope: 'col', class: 'corner' }, total === 1 ? '1 module or operator' : `${count(total)} modules or operators`),
      heads.map((sbp, at) => make('th', { scope: 'col', class: starts[at] ? 'start' : '', 'aria-label': sbp }, splitPlacement(sbp).map((axis) => make('span', { 'aria-hidden': 'true' }, axis)))),
      make('th', { scope: 'col', class: 'sum' }, 'failed'),
    ));
    const body = make('tbody', {});
    let suite = null;
    const several = new Set(rows.map((row) => row.suite)).size > 1;
    this.order_ = [];
    for (const row of rows) {
      if (several && row.suite !== suite && this.app.filters.get('sort') === 'name') {
        suite = row.suite;
        body.append(make('tr', { class: 'suite-row' }, make('th', { colspan: heads.length + 2, scope: 'rowgroup' }, suite)));
      }
      body.append(this.row(row, heads, starts, false, several));
      if (this.expanded.has(row.key)) {
        for (const one of [...row.cases.values()].sort((a, b) => b.bad - a.bad || b.known - a.known || a.name.localeCompare(b.name))) body.append(this.row(one, heads, starts, true, false));
      }
    }
    const table = make('table', { role: 'grid', 'aria-label': 'Verdicts of each module or operator by placement' }, head, body);
    const first = table.querySelector('button.cell');
    if (first) first.tabIndex = 0;
    return make('div', { class: 'matrix-scroll', tabindex: '-1' }, table);
  }

  row(row, heads, starts, isCase, several) {
    const open = this.expanded.has(row.key);
    const toggle = isCase || !row.cases.size ? null : make('button', { type: 'button', class: 'toggle', 'aria-expanded': String(open), 'aria-label': `Cases of ${row.name}`, data: { row: row.key } }, open ? '▾' : '▸');
    const label = make('th', { scope: 'row', class: isCase ? 'case' : '' }, make('div', { class: 'row-name' }, toggle, make('span', { class: 'name', title: row.name }, row.name), several ? make('small', {}, row.suite) : null));
    const cells = heads.map((sbp, at) => {
      const trials = row.cells.get(sbp);
      const start = starts[at] ? 'start' : '';
      if (!trials) return make('td', { class: start });
      return make('td', { class: start, role: 'gridcell' }, this.cell(row, sbp, trials));
    });
    const failed = row.bad + row.known;
    return make('tr', { class: isCase ? 'case-row' : '' }, label, cells, make('td', { class: `sum${row.bad ? ' bad' : ''}` }, failed ? `${count(failed)}/${count(row.all)}` : make('span', { class: 'muted' }, count(row.all))));
  }

  cell(row, sbp, trials) {
    const { data } = this;
    const found = summarise(data, trials);
    const key = `${row.key}\n${sbp}`;
    this.cells.set(key, { row, sbp, trials, found });
    const share = found.failed / trials.length;
    const label = `${row.name}, ${sbp}: ${found.lines.join(', ')}`;
    const button = make(
      'button',
      { type: 'button', class: `cell v-${slug(found.word)}${found.known ? ' known' : ''}${found.failed ? ' failed' : ''}`, tabindex: '-1', 'aria-label': label, data: { cell: key } },
      make('span', {}, data.letters[found.word]),
      found.failed && share < 1 ? make('i', { class: `share s${Math.max(1, Math.round(share * 10))}` }) : null,
      found.changed ? make('i', { class: `changed ${found.changed}`, title: found.changed }, found.changed === 'new' ? '▲' : '▼') : null,
    );
    if (this.app.filters.get('cell') === key) button.setAttribute('aria-current', 'true');
    return button;
  }

  hover(button) {
    if (!button) { tip.hide(); return; }
    const cell = this.cells.get(button.dataset.cell);
    if (!cell) return;
    const lines = [`${cell.row.name}  ·  ${cell.sbp}`, ...cell.found.lines];
    const worst = cell.found.worst;
    if (worst !== null) {
      const [finding] = this.data.findings(worst);
      if (finding) lines.push(`${finding.quantity ? `${finding.quantity}: ` : ''}${finding.relation}`.slice(0, 200));
      if (this.data.known(worst)) lines.push(`known: ${this.data.reason(worst)}`.slice(0, 200));
    }
    tip.show(button, lines);
  }

  click(event) {
    const toggle = event.target.closest('button.toggle');
    if (toggle) {
      const key = toggle.dataset.row;
      if (this.expanded.has(key)) this.expanded.delete(key); else this.expanded.add(key);
      this.app.refresh();
      const again = [...this.element.querySelectorAll('button.toggle')].find((one) => one.dataset.row === key);
      if (again) again.focus();
      return;
    }
    const button = event.target.closest('button.cell');
    if (button) this.openCell(button.dataset.cell, button);
  }

  openCell(key, button) {
    const cell = this.cells.get(key);
    if (!cell) return;
    this.app.filters.set({ cell: key });
    const tensor = this.tensor === FIRST ? (this.data.firstTensor(cell.trials[0]) || 'input') : this.tensor;
    this.app.detail.open(cell.trials, `${cell.row.name}, ${tensor} ${cell.sbp}`, undefined, button);
    this.app.selected();
  }

  selected() {
    const now = this.app.filters.get('cell');
    for (const button of this.element.querySelectorAll('button.cell')) {
      if (button.dataset.cell === now) button.setAttribute('aria-current', 'true');
      else button.removeAttribute('aria-current');
    }
  }

  // Arrow keys move from cell to cell, as in a spreadsheet; empty places are passed over.
  key(event) {
    const button = event.target.closest('button.cell');
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -Infinity], End: [0, Infinity] };
    const move = moves[event.key];
    if (!button || !move) return;
    event.preventDefault();
    const line = button.closest('tr');
    const column = [...line.children].indexOf(button.parentElement);
    let target = null;
    if (move[0]) {
      let next = line;
      while (next && !target) {
        next = move[0] > 0 ? next.nextElementSibling : next.previousElementSibling;
        if (next && next.children[column]) target = next.children[column].querySelector('button.cell');
      }
    } else {
      const cells = [...line.querySelectorAll('button.cell')];
      const at = cells.indexOf(button) + move[1];
      target = cells[Math.min(Math.max(at, 0), cells.length - 1)];
    }
    if (!target) return;
    button.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
    target.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  }

  legend(trials) {
    const { data } = this;
    const present = new Set(trials.map((trial) => data.word(trial)));
    const words = [...data.raw.failures, ...data.raw.harmless].filter((word) => present.has(word));
    const items = words.map((word) => make('li', {}, mark(data, word, false), word));
    if (trials.some((trial) => data.failed(trial) && data.known(trial))) items.push(make('li', {}, make('span', { class: 'mark v-wrong-value known' }, '•'), 'striped: known failure'));
    items.push(make('li', {}, make('span', { class: 'mark sample' }, make('i', { class: 'share s5' })), 'bar: share of trials that fail'));
    if (data.diff) items.push(make('li', {}, '▲ new since the old run'), make('li', {}, '▼ fixed'));
    return make('ul', { class: 'legend', 'aria-label': 'Legend' }, items);
  }
}

// The word that stands for several trials: the most frequent unexpected failure, else the most frequent known one, else
// what is harmless. Among equals the gravest. `worst` is a trial that shows it.
function summarise(data, trials) {
  const counts = new Map();
  let worst = null;
  let failed = 0;
  let isNew = false;
  let isFixed = false;
  const weight = (trial) => {
    if (data.unexpected(trial)) return data.rank[data.raw.verdict[trial]];
    if (data.failed(trial)) return 100 + data.rank[data.raw.verdict[trial]];
    return 200 + ['pass', 'noise', 'refused'].indexOf(data.word(trial));
  };
  const byWeight = new Map();
  for (const trial of trials) {
    const label = data.word(trial) + (data.failed(trial) && data.known(trial) ? ' (known)' : '');
    counts.set(label, (counts.get(label) || 0) + 1);
    if (data.failed(trial)) failed += 1;
    const found = byWeight.get(weight(trial));
    if (found) found.times += 1; else byWeight.set(weight(trial), { trial, times: 1 });
    const state = data.state(trial);
    if (state === 'new' || state === 'changed') isNew = true;
    if (state === 'fixed') isFixed = true;
  }
  const level = (one) => Math.floor(one / 100);
  const gravest = Math.min(...[...byWeight.keys()].map(level));
  // What is harmless goes by its order: one trial that passes makes a cell that passes.
  const [, chosen] = [...byWeight].filter(([one]) => level(one) === gravest).sort(
    ([one, a], [other, b]) => (gravest < 2 ? b.times - a.times : 0) || one - other,
  )[0];
  worst = chosen.trial;
  const word = data.word(worst);
  return {
    word,
    known: data.failed(worst) && data.known(worst),
    failed,
    worst: data.failed(worst) ? worst : null,
    changed: isNew ? 'new' : isFixed ? 'fixed' : '',
    lines: [...counts].sort((one, other) => other[1] - one[1]).map(([name, number]) => `${count(number)} ${name}`),
  };
}

function splitPlacement(sbp) {
  return sbp.startsWith('(') ? sbp.slice(1, -1).split(/,(?![^(]*\))/) : [sbp];
}

// B, then S(0), S(1), ..., then P; by the first axis first, meshes of one axis before those of more.
function comparePlacements(one, other) {
  const a = splitPlacement(one);
  const b = splitPlacement(other);
  if (a.length !== b.length) return a.length - b.length;
  const key = (axis) => (axis === 'B' ? 0 : axis.startsWith('S') ? 1 + Number(axis.replace(/\D/g, '') || 0) : 1000);
  for (let at = 0; at < a.length; at += 1) {
    if (key(a[at]) !== key(b[at])) return key(a[at]) - key(b[at]);
    if (a[at] !== b[at]) return a[at].localeCompare(b[at]);
  }
  return 0;
}
