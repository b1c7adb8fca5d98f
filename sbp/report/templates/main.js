// The page: views, keys, theme.

class App {
  constructor(data) {
    this.data = data;
    this.filters = new Filters(data);
    this.detail = new Detail(this);
    this.bar = new FilterBar(this);
    this.redraw = null;
    this.views = [
      ['matrix', 'Matrix', new Matrix(this)],
      ['failures', 'Failures', new Failures(this)],
      ['trials', 'All trials', new Trials(this)],
      ['errors', 'Errors', new Plot(this)],
    ];
    if (data.raw.inplace.length) this.views.push(['inplace', 'In place', new InPlace(this)]);
    this.buildTabs();
    this.keys();
    addEventListener('hashchange', () => { this.filters.read(); this.refresh(); this.restore(); });
  }

  get view() {
    const wanted = this.filters.get('view');
    return this.views.some(([name]) => name === wanted) ? wanted : this.views[0][0];
  }

  buildTabs() {
    const tabs = document.getElementById('tabs');
    for (const [name, text] of this.views) {
      tabs.append(make('button', { type: 'button', role: 'tab', id: `tab-${name}`, 'aria-controls': 'view', onclick: () => this.go(name) }, text));
    }
    tabs.addEventListener('keydown', (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const names = this.views.map(([name]) => name);
      const next = names[(names.indexOf(this.view) + move + names.length) % names.length];
      this.go(next);
      document.getElementById(`tab-${next}`).focus();
    });
  }

  go(name) {
    this.filters.set({ view: name === this.views[0][0] ? '' : name });
    this.refresh();
  }

  refresh() {
    tip.hide();
    this.redraw = null;
    this.bar.refresh();
    for (const [name] of this.views) {
      const tab = document.getElementById(`tab-${name}`);
      tab.setAttribute('aria-selected', String(name === this.view));
      tab.tabIndex = name === this.view ? 0 : -1;
    }
    const trials = this.filters.trials();
    const view = this.views.find(([name]) => name === this.view)[2];
    const holder = document.getElementById('view');
    const scroll = holder.querySelector('.matrix-scroll');
    const kept = scroll ? [scroll.scrollLeft, scroll.scrollTop] : null;
    holder.setAttribute('aria-labelledby', `tab-${this.view}`);
    holder.replaceChildren(view.render(trials));
    const again = holder.querySelector('.matrix-scroll');
    if (kept && again) [again.scrollLeft, again.scrollTop] = kept;
    const failed = trials.filter((trial) => this.data.unexpected(trial)).length;
    document.getElementById('status').textContent = `${plural(trials.length, 'trial')} shown, ${plural(failed, 'unexpected failure')}`;
  }

  // Open what the address names.
  restore() {
    const cell = this.filters.get('cell');
    const named = this.filters.get('t');
    if (cell && this.view === 'matrix') {
      const matrix = this.views[0][2];
      const found = matrix.cells.get(cell);
      if (found) {
        matrix.openCell(cell, null);
        const trial = this.named(named);
        if (trial !== undefined && found.trials.includes(trial)) { this.detail.at = this.detail.trials.indexOf(trial); this.detail.show(); }
        return;
      }
    }
    const trial = this.named(named);
    if (trial !== undefined) this.detail.open([trial], this.data.case(trial).short, trial);
    else if (!this.detail.element.hidden) this.detail.close();
  }

  named(text) {
    if (!text) return undefined;
    for (const subject of new Set(this.data.groups.map((group) => group.subject))) {
      const id = text.startsWith(`${subject}:`) ? text.slice(subject.length + 1) : text;
      const trial = this.data.find(subject, id);
      if (trial !== undefined) return trial;
    }
    return undefined;
  }

  openTrials(trials, title, start, opener) {
    this.filters.set({ cell: '' });
    this.detail.open(trials, title, start, opener);
    this.detail.element.querySelector('h2').focus({ preventScroll: true });
  }

  selected() { if (this.view === 'matrix') this.views[0][2].selected(); }

  keys() {
    document.addEventListener('keydown', (event) => {
      const typing = event.target.closest && event.target.closest('input, select, textarea');
      if (event.key === 'Escape') {
        if (typing && event.target.value) return; // empties a search field first
        tip.hide();
        this.detail.close();
      }
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === '/') { event.preventDefault(); document.getElementById('f-q').focus(); }
      if (event.key === 'j') this.detail.step(1);
      if (event.key === 'k') this.detail.step(-1);
    });
  }
}

function theme() {
  const button = document.getElementById('theme');
  const order = ['auto', 'light', 'dark'];
  const stored = () => { try { return localStorage.getItem('sbp-theme'); } catch { return null; } };
  const apply = (name) => {
    if (name === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
    if (window.sbpApp && window.sbpApp.redraw) window.sbpApp.redraw();
  };
  let now = order.includes(stored()) ? stored() : 'auto';
  apply(now);
  button.addEventListener('click', () => {
    now = order[(order.indexOf(now) + 1) % order.length];
    try { localStorage.setItem('sbp-theme', now); } catch { /* pages from disk may not store */ }
    apply(now);
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => apply(now));
}

async function start() {
  theme();
  const status = document.getElementById('status');
  if (typeof DecompressionStream === 'undefined') {
    status.textContent = 'This browser is too old for the matrix: it cannot unpack the data.';
    return;
  }
  const data = new Data(await unpack());
  const app = new App(data);
  window.sbpApp = app;
  document.getElementById('app').hidden = false;
  app.refresh();
  app.restore();
  document.documentElement.dataset.ready = 'true';
}

start().catch((error) => {
  document.getElementById('status').textContent = `The page could not be built: ${error.message}`;
  throw error;
});
