// Lists: each distinct failure once; all trials; what was written in place.

class Failures {
  constructor(app) {
    this.app = app;
    this.data = app.data;
    this.limit = 200;
  }

  render(trials) {
    const { data, app } = this;
    const groups = new Map();
    const states = data.diff && app.filters.get('c').length;
    for (const trial of trials) {
      if (!data.failed(trial) && !states) continue;
      // What is fixed has no finding now: it is told apart by what it was.
      const was = data.state(trial) === 'fixed' ? this.was(trial) : '';
      const key = data.failureKey(trial) + was + (data.diff ? `\n${data.state(trial)}` : '') + (data.known(trial) ? '\nknown' : '');
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(trial);
    }
    const order = (members) => (data.unexpected(members[0]) ? 0 : 1);
    const sorted = [...groups.values()].sort((one, other) => order(one) - order(other) || other.length - one.length);
    const unexpected = sorted.filter((members) => data.unexpected(members[0])).length;
    const head = make('p', { class: 'lead' }, `${plural(unexpected, 'distinct unexpected failure')}${sorted.length > unexpected ? `, ${count(sorted.length - unexpected)} others` : ''}. Failures of one module or operator that are wrong in the same quantity in the same way are one.`);
    const list = make('ul', { class: 'cards' }, sorted.slice(0, this.limit).map((members) => this.card(members)));
    const left = sorted.length - this.limit;
    const more = left > 0 ? make('button', { type: 'button', class: 'quiet more', onclick: () => { this.limit += 500; app.refresh(); } }, `Show ${left} more`) : null;
    if (!sorted.length) return make('p', { class: 'empty' }, trials.length ? 'No failure among these trials.' : 'No trial passes the filters.');
    return make('div', {}, ...[head, list, more].filter(Boolean));
  }

  was(trial) {
    const old = this.data.old(trial);
    if (!old) return '';
    const first = old.lines.split('\n')[0].replace(/; claimed .*$| \(relative error .*$/, '');
    return old.word + (first ? `: ${first}` : '');
  }

  card(members) {
    const { data, app } = this;
    const fewest = members.reduce((one, other) => (data.placements(other).length < data.placements(one).length ? other : one));
    const [finding] = data.findings(fewest);
    const one = data.case(fewest);
    const placed = data.placements(fewest).map(([name, sbp]) => `${name}=${sbp}`).join(', ') || 'all B';
    const open = (event) => app.openTrials(members, `${one.short}: ${data.word(fewest)}`, fewest, event.currentTarget);
    const state = data.diff ? make('span', { class: `state state-${slug(data.state(fewest))}` }, data.state(fewest)) : null;
    return make(
      'li', { class: `card v-${slug(data.word(fewest))}${data.known(fewest) ? ' known' : ''}` },
      make(
        'button', { type: 'button', class: 'card-open', onclick: open, 'aria-label': `${data.word(fewest)} in ${one.short}, ${plural(members.length, 'trial')}: open` },
        make('span', { class: 'card-head' }, badge(data, data.word(fewest), data.known(fewest)), make('strong', {}, one.short), finding && finding.quantity ? make('code', {}, finding.quantity) : null, state,
          make('span', { class: 'times' }, plural(members.length, 'trial'))),
        make('span', { class: 'card-relation' }, data.state(fewest) === 'fixed' ? `was ${this.was(fewest)}` : finding ? finding.relation : ''),
        make('span', { class: 'card-where' }, `for instance ${one.name} on ${data.group(fewest).mesh}, ${placed}`),
        data.known(fewest) ? make('span', { class: 'card-where' }, `known: ${data.reason(fewest)}`) : null,
      ),
    );
  }
}

// All trials, in a window over the whole list: only the rows in sight are in the page.
class Trials {
  constructor(app) {
    this.app = app;
    this.data = app.data;
    this.height = 34;
    this.inner = make('div', { class: 'rows', role: 'list' });
    this.scroller = make('div', { class: 'trial-scroll', tabindex: '0', 'aria-label': 'Trials' }, this.inner);
    this.scroller.addEventListener('scroll', () => requestAnimationFrame(() => this.fill()));
    this.scroller.addEventListener('keydown', (event) => this.key(event));
    this.inner.addEventListener('click', (event) => {
      const row = event.target.closest('button.trial');
      if (row) this.open(Number(row.dataset.at), row);
    });
    this.inner.addEventListener('focusin', (event) => { this.current = Number(event.target.dataset.at); });
    this.trials = [];
    this.current = 0;
  }

  render(trials) {
    this.trials = trials;
    this.current = Math.min(this.current, Math.max(trials.length - 1, 0));
    this.inner.style.height = `${trials.length * this.height}px`;
    this.from = -1;
    queueMicrotask(() => this.fill());
    if (!trials.length) return make('p', { class: 'empty' }, 'No trial passes the filters.');
    return make('div', {}, make('p', { class: 'lead' }, plural(trials.length, 'trial')), this.scroller);
  }

  fill() {
    const first = Math.max(Math.floor(this.scroller.scrollTop / this.height) - 10, 0);
    const last = Math.min(first + Math.ceil((this.scroller.clientHeight || 600) / this.height) + 20, this.trials.length);
    if (first === this.from && this.inner.childElementCount) return;
    this.from = first;
    const focused = this.inner.contains(document.activeElement);
    this.inner.replaceChildren(...this.trials.slice(first, last).map((trial, offset) => this.row(trial, first + offset)));
    if (focused) this.focus();
  }

  row(trial, at) {
    const { data } = this;
    const [finding] = data.findings(trial);
    const words = finding ? `${finding.quantity ? `${finding.quantity}: ` : ''}${finding.relation}` : '';
    const element = make(
      'button', { type: 'button', class: 'trial', tabindex: at === this.current ? '0' : '-1', data: { at: String(at) }, role: 'listitem' },
      badge(data, data.word(trial), data.known(trial)), make('span', { class: 'trial-id' }, data.id(trial)), make('span', { class: 'trial-words' }, words),
    );
    element.style.top = `${at * this.height}px`;
    return element;
  }

  open(at, row) {
    this.current = at;
    this.app.openTrials(this.trials, 'Trials', this.trials[at], row);
  }

  key(event) {
    const page = Math.floor(this.scroller.clientHeight / this.height);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === 'Enter' && event.target === this.scroller && this.trials.length) this.open(this.current, this.scroller);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.current = Math.min(Math.max(this.current + moves[event.key], 0), this.trials.length - 1);
    const top = this.current * this.height;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    if (top + this.height > this.scroller.scrollTop + this.scroller.clientHeight) this.scroller.scrollTop = top + this.height - this.scroller.clientHeight;
    this.from = -1;
    this.fill();
    this.focus();
  }

  focus() {
    // A row that was scrolled out of the window is gone: then the list itself has the focus, and keys still work.
    const row = this.inner.querySelector(`[data-at="${this.current}"]`);
    (row || this.scroller).focus({ preventScroll: true });
  }
}

class InPlace {
  constructor(app) { this.app = app; this.data = app.data; }

  render() {
    const rows = this.data.raw.inplace.map(([file, line, operator, module, outcome, source, placements, message, times]) => make(
      'tr', {},
      make('td', {}, make('b', {}, outcome)), make('td', {}, make('code', {}, source || operator)), make('td', { class: 'mono' }, file ? `${file}${line === null ? '' : `:${line}`}` : ''),
      make('td', { class: 'mono' }, module), make('td', { class: 'mono' }, placements), make('td', {}, message), make('td', { class: 'number' }, count(times)),
    ));
    const heads = ['outcome', 'operation', 'place', 'module', 'placements', '', 'times'];
    const left = this.data.raw.inplaceLeft;
    return make(
      'div', {}, make('p', { class: 'lead' }, 'Operations that wrote to a distributed tensor in place, as the watch saw them.'),
      make('div', { class: 'wide-scroll' }, make('table', { class: 'plain-table' }, make('thead', {}, make('tr', {}, heads.map((text) => make('th', { scope: 'col' }, text)))), make('tbody', {}, rows))),
      left ? make('p', { class: 'muted' }, `${count(left)} more are in the results file.`) : null,
    );
  }
}
