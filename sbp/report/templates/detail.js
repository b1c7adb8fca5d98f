// The panel beside a view: the trials of a cell or a failure, and everything about one of them.

class Detail {
  constructor(app) {
    this.app = app;
    this.data = app.data;
    this.element = document.getElementById('detail');
    this.trials = [];
    this.at = 0;
    this.opener = null;
  }

  // Show some trials, the gravest first; `title` says what they have in common.
  open(trials, title, start, opener) {
    const { data } = this;
    const weight = (trial) => (data.unexpected(trial) ? data.rank[data.raw.verdict[trial]] : data.failed(trial) ? 100 : 200);
    this.trials = [...trials].sort((one, other) => weight(one) - weight(other) || one - other);
    this.title = title;
    this.at = Math.max(0, start === undefined ? 0 : this.trials.indexOf(start));
    this.opener = opener || document.activeElement;
    tip.hide();
    this.element.hidden = false;
    document.body.classList.add('with-detail');
    this.show();
  }

  close() {
    if (this.element.hidden) return;
    this.element.hidden = true;
    document.body.classList.remove('with-detail');
    this.app.filters.set({ t: '', cell: '' });
    this.app.selected();
    if (this.opener && this.opener.isConnected) this.opener.focus();
  }

  step(by) {
    if (this.element.hidden || !this.trials.length) return;
    this.at = (this.at + by + this.trials.length) % this.trials.length;
    this.show();
  }

  get trial() { return this.trials[this.at]; }

  show() {
    const { data, trial } = this;
    const many = this.trials.length > 1;
    const subject = data.group(trial).subject;
    this.app.filters.set({ t: (data.groups.some((group) => group.subject !== subject) ? `${subject}:` : '') + data.id(trial) });
    const head = make(
      'div', { class: 'detail-head' },
      make('div', { class: 'detail-title' }, make('h2', { tabindex: '-1' }, this.title),
        make('button', { type: 'button', class: 'close', 'aria-label': 'Close', onclick: () => this.close() }, '✕')),
      many ? make(
        'div', { class: 'stepper' },
        make('button', { type: 'button', 'aria-label': 'Previous trial', onclick: () => this.step(-1) }, '‹'),
        make('span', { 'aria-live': 'polite' }, `trial ${count(this.at + 1)} of ${count(this.trials.length)}`),
        make('button', { type: 'button', 'aria-label': 'Next trial', onclick: () => this.step(1) }, '›'),
        this.tally(),
      ) : null,
    );
    this.element.replaceChildren(head, make('div', { class: 'detail-body' }, this.body(trial)));
    this.element.scrollTop = 0;
  }

  tally() {
    const counts = new Map();
    for (const trial of this.trials) {
      const key = this.data.word(trial);
      counts.set(key, (counts.get(key) || 0) + 1);
    }
    return make('span', { class: 'tally' }, [...counts].map(([word, number]) => make('span', { title: `${number} ${word}` }, mark(this.data, word, false), String(number))));
  }

  body(trial) {
    const { data } = this;
    const group = data.group(trial);
    const one = data.case(trial);
    const more = data.more(trial);
    const id = data.id(trial);
    const parts = [];
    parts.push(make('p', { class: 'verdict-line' }, badge(data, data.word(trial), data.known(trial)), more.flaky ? make('span', { class: 'flag' }, 'flaky: it passed when it was tried again alone') : null));
    if (data.known(trial)) parts.push(make('p', { class: 'reason' }, make('b', {}, 'Known: '), data.reason(trial)));
    if (data.diff) parts.push(this.comparison(trial));
    parts.push(make('h3', {}, one.name));
    parts.push(make('div', { class: 'placements' }, this.placements(trial)));
    const facts = [['suite', group.suite], ['subject', group.subject], ['mesh', group.mesh], ['dtype', group.dtype], ['device', group.device],
      ['kind', group.kind], ['options', group.options], ['time', `${(data.raw.ms[trial] / 1000).toFixed(3)} s`], ['sensitivity', more.sensitivity]];
    parts.push(make('dl', { class: 'small-facts' }, facts.filter(([, value]) => value).map(([name, value]) => make('div', {}, make('dt', {}, name), make('dd', {}, value)))));
    const findings = data.findings(trial);
    if (findings.length) parts.push(make('h4', {}, findings.length > 1 ? `Findings (${findings.length})` : 'Finding'), make('ol', { class: 'findings' }, findings.map((finding) => this.finding(finding))));
    if (more.origin && (more.origin[0] || more.origin[2] || more.origin[3])) {
      const [file, line, module, operator] = more.origin;
      const where = [file ? `${file}${line === null ? '' : `:${line}`}` : '', module ? `in ${module}` : '', operator].filter(Boolean).join(', ');
      parts.push(make('h4', {}, 'Where it begins'), make('p', { class: 'mono' }, where));
    }
    if (more.command) parts.push(make('h4', {}, 'Run just this trial'), codeBox(more.command, 'the command'));
    if (more.repro) parts.push(make('h4', {}, 'Stand-alone program that shows it'), codeBox(more.repro, 'the repro'));
    if (more.error) parts.push(this.error(more.error));
    const noise = data.noise(trial);
    if (noise.length) parts.push(this.noise(noise));
    else if (data.raw.error[trial] !== null) {
      const largest = data.raw.error[trial];
      parts.push(make('p', { class: 'muted' }, `Largest relative error among what is right: ${largest <= -9999 ? '0' : powerText(largest)}`));
    }
    parts.push(make('h4', {}, 'Id'), codeBox(id, 'the id'));
    return parts;
  }

  placements(trial) {
    const { data } = this;
    const tensors = data.case(trial).tensors;
    if (!tensors.length) return make('span', { class: 'muted' }, 'no tensor with a placement');
    return tensors.map((name) => {
      const sbp = data.placement(trial, name);
      return make('span', { class: `placed${sbp === 'B' ? ' is-b' : ''}` }, make('span', {}, name), make('b', {}, sbp));
    });
  }

  finding(finding) {
    const size = finding.relative === null || finding.relative === 0 ? null : make('span', {}, `relative error ${showNumber(finding.relative)}`);
    const largest = finding.largest ? make('span', {}, `largest ${showNumber(finding.largest)}`) : null;
    const ranks = finding.ranks.length ? make('span', {}, `rank${finding.ranks.length > 1 ? 's' : ''} ${finding.ranks.join(', ')}`) : null;
    const claimed = finding.claimed === null ? null : make('span', {}, `claimed ${finding.claimed}`, finding.expected === null ? null : `, due ${finding.expected}`);
    return make(
      'li', {},
      make('div', { class: 'quantity' }, finding.quantity ? make('code', {}, finding.quantity) : null, finding.verdict ? badge(this.data, this.data.letters[finding.verdict] ? finding.verdict : 'error', false) : null),
      make('div', { class: 'relation' }, finding.relation),
      make('div', { class: 'numbers' }, claimed, size, largest, ranks),
      finding.detail ? make('pre', { class: 'detail-text' }, finding.detail) : null,
    );
  }

  error(error) {
    const stacks = Object.entries(error.stacks || {});
    return make(
      'div', {},
      make('h4', {}, 'Error'),
      make('p', { class: 'mono message' }, make('b', {}, error.type), error.message ? `: ${error.message}` : ''),
      error.traceback ? make('details', { open: !stacks.length }, make('summary', {}, 'Traceback'), codeBox(error.traceback, 'the traceback')) : null,
      stacks.map(([rank, stack]) => make('details', {}, make('summary', {}, `Where rank ${rank} was`), codeBox(stack, `the stack of rank ${rank}`))),
      error.line ? make('p', { class: 'muted' }, `The traceback is on line ${error.line} of the results file.`) : null,
    );
  }

  noise(noise) {
    const rows = noise.map((one) => make(
      'tr', { class: one.error - one.noise > 70 ? 'over' : '' },
      make('td', {}, make('code', {}, one.quantity)), make('td', {}, powerText(one.error)), make('td', {}, powerText(one.noise)),
      make('td', {}, ratioText(one)),
    ));
    const head = ['quantity', 'relative error', 'noise', 'ratio'].map((text) => make('th', { scope: 'col' }, text));
    return make('div', {}, make('h4', {}, 'Error against noise'), make('table', { class: 'plain-table' }, make('thead', {}, make('tr', {}, head)), make('tbody', {}, rows)));
  }

  comparison(trial) {
    const { data } = this;
    const state = data.state(trial);
    const old = data.old(trial);
    const meaning = data.diff.meaning[data.diff.states.indexOf(state)];
    return make(
      'div', { class: `comparison state-${slug(state)}` },
      make('b', {}, state), ` ${meaning}`,
      old ? make('div', {}, 'before: ', badge(data, old.word, false), old.lines ? make('pre', {}, old.lines) : null) : null,
    );
  }
}

// Logarithms come as hundredths.
function powerText(hundredths) {
  if (hundredths === null || hundredths === undefined) return '';
  if (hundredths >= 9999) return 'not finite';
  if (hundredths <= -9999) return '0';
  return showNumber(Number((10 ** (hundredths / 100)).toPrecision(2)));
}

function ratioText(one) {
  if (one.error === null || one.noise === null) return '';
  if (one.error >= 9999) return 'not finite';
  if (one.error <= -9999) return '0';
  if (one.noise <= -9999) return 'no noise';
  return `${showNumber(Number((10 ** ((one.error - one.noise) / 100)).toPrecision(2)))} ×`;
}
