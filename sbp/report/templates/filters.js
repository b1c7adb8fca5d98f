// What is shown: the filters, kept in the address after the #, so that a view can be sent and found again.

const PARAMETERS = {
  view: '', v: [], k: '', c: [], m: '', s: '', subject: '', mesh: '', dtype: '', p: '', q: '', by: '', sort: '', cell: '', t: '',
};

class Filters {
  constructor(data) {
    this.data = data;
    this.values = {};
    this.read();
  }

  read() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const [name, empty] of Object.entries(PARAMETERS)) {
      const text = given.get(name) || '';
      this.values[name] = Array.isArray(empty) ? text.split(',').filter(Boolean) : text;
    }
  }

  get(name) { return this.values[name]; }

  set(changes) {
    Object.assign(this.values, changes);
    const written = new URLSearchParams();
    for (const name of Object.keys(PARAMETERS)) {
      const value = this.values[name];
      const text = Array.isArray(value) ? value.join(',') : value;
      if (text) written.set(name, text);
    }
    // Brackets, commas and slashes may stand in a fragment: an address that can be read.
    const text = written.toString().replace(/%(28|29|2C|2F|3A)/g, (code) => decodeURIComponent(code));
    history.replaceState(null, '', text ? `#${text}` : location.pathname + location.search);
  }

  toggle(name, value) {
    const now = this.values[name];
    this.set({ [name]: now.includes(value) ? now.filter((other) => other !== value) : [...now, value] });
  }

  clear() {
    const kept = { view: this.values.view, by: this.values.by, sort: this.values.sort };
    this.set({ ...structuredClone(PARAMETERS), ...kept });
  }

  get active() {
    return ['v', 'k', 'c', 'm', 's', 'subject', 'mesh', 'dtype', 'p', 'q'].some((name) => this.values[name].length > 0);
  }

  // The trials that pass the filters; but for those named in `except`, so that chips can show what they would give.
  trials(except = []) {
    const narrowing = ['v', 'k', 'c', 'm', 's', 'subject', 'mesh', 'dtype', 'p', 'q'].map((name) => (except.includes(name) ? '' : this.values[name]));
    const key = JSON.stringify(narrowing);
    if (this.lastKey !== key) {
      this.lastKey = key;
      this.last = this.select(except);
    }
    return this.last;
  }

  select(except) {
    const { data, values } = this;
    const raw = data.raw;
    const on = (name) => !except.includes(name) && values[name].length > 0;
    const words = on('v') ? new Set(values.v.map((word) => data.words.indexOf(word))) : null;
    const states = data.diff && on('c') ? new Set(values.c) : null;
    const groupFits = data.groups.map((group) => (
      (!on('s') || group.suite === values.s)
      && (!on('subject') || group.subject === values.subject)
      && (!on('mesh') || group.mesh === values.mesh)
      && (!on('dtype') || group.dtype === values.dtype)
    ));
    const caseFits = data.cases.map((one) => !on('m') || one.short === values.m || one.name === values.m);
    const placed = on('p') ? placementTest(values.p) : null;
    const words2 = on('q') ? values.q.toLowerCase().split(/\s+/).filter(Boolean) : [];
    const found = [];
    for (let trial = 0; trial < data.size; trial += 1) {
      if (words && !words.has(raw.verdict[trial])) continue;
      if (!groupFits[raw.group[trial]] || !caseFits[raw.case[trial]]) continue;
      if (on('k') && !(values.k === 'known' ? data.failed(trial) && data.known(trial) : data.unexpected(trial))) continue;
      if (states ? !states.has(data.state(trial)) : data.gone(trial)) continue;
      if (placed && !placed(data, trial)) continue;
      if (words2.length) {
        const text = data.haystack(trial);
        if (!words2.every((word) => text.includes(word))) continue;
      }
      found.push(trial);
    }
    return found;
  }
}

// 'input=S(0)' wants that of the tensor, 'S(0)' of any; several, apart by blanks or semicolons, must all hold.
// On a mesh of more axes 'S(0)' also fits where one axis has it.
function placementTest(text) {
  const wanted = text.replace(/,\s+/g, ',').split(/[\s;]+/).filter(Boolean).map((part) => {
    const at = part.indexOf('=');
    return at < 0 ? ['', part] : [part.slice(0, at), part.slice(at + 1)];
  });
  const fits = (has, wants) => {
    const plain = has.replaceAll(' ', '');
    if (plain.toLowerCase() === wants.toLowerCase()) return true;
    if (!plain.startsWith('(') || wants.startsWith('(')) return false;
    return plain.slice(1, -1).split(/,(?![^(]*\))/).some((axis) => axis.toLowerCase() === wants.toLowerCase());
  };
  return (data, trial) => wanted.every(([tensor, wants]) => {
    if (tensor) return data.case(trial).tensors.includes(tensor) ? fits(data.placement(trial, tensor), wants) : wants === 'B';
    const all = data.placements(trial);
    if (wants === 'B') return all.length < data.case(trial).tensors.length || !all.length;
    return all.some(([, has]) => fits(has, wants));
  });
}

// The row of chips, with the number of trials that each would show, and the fields below.
class FilterBar {
  constructor(app) {
    this.app = app;
    this.data = app.data;
    this.filters = app.filters;
    this.buildFields();
  }

  buildFields() {
    const { data, filters } = this;
    const unique = (values) => [...new Set(values)].filter(Boolean).sort((one, other) => one.localeCompare(other));
    const modules = unique(data.cases.map((one) => one.short));
    const placements = new Set();
    for (let trial = 0; trial < data.size; trial += 1) {
      for (const [name, sbp] of data.placements(trial)) placements.add(`${name}=${sbp.replaceAll(' ', '')}`);
    }
    const simple = [...placements].map((text) => text.split('=')[1]).filter((text) => !text.startsWith('('));
    const form = document.getElementById('fields');
    const field = (name, label, element) => {
      element.id = `f-${name}`;
      element.name = name;
      return make('label', { class: `field field-${name}` }, make('span', {}, label), element);
    };
    const choice = (name, label, values, every) => {
      if (values.length < 2 && !filters.get(name)) return null;
      const select = make('select', {}, make('option', { value: '' }, every), values.map((value) => make('option', { value }, value)));
      return field(name, label, select);
    };
    const known = make('select', {}, [['', 'all trials'], ['unexpected', 'unexpected failures'], ['known', 'known failures']].map(
      ([value, text]) => make('option', { value }, text),
    ));
    form.replaceChildren(...[
      field('q', 'Text', make('input', { type: 'search', placeholder: 'id, quantity, words of a finding', autocomplete: 'off', spellcheck: 'false' })),
      choice('m', 'Module or operator', modules, `all ${modules.length}`),
      field('p', 'Placement', make('input', { type: 'search', placeholder: 'S(0) or input=S(0)', list: 'placements', autocomplete: 'off', spellcheck: 'false' })),
      choice('mesh', 'Mesh', unique(data.groups.map((group) => group.mesh)), 'all'),
      choice('dtype', 'Dtype', unique(data.groups.map((group) => group.dtype)), 'all'),
      choice('s', 'Suite', unique(data.groups.map((group) => group.suite)), 'all'),
      choice('subject', 'Subject', unique(data.groups.map((group) => group.subject)), 'all'),
      field('k', 'Show', known),
      make('button', { type: 'button', id: 'clear', class: 'quiet' }, 'Clear filters'),
      make('datalist', { id: 'placements' }, [...unique(simple), ...unique([...placements])].slice(0, 400).map((value) => make('option', { value }))),
    ].filter(Boolean));
    // On a narrow screen the fields fold away, so that the matrix is in sight.
    const fold = document.getElementById('fold');
    fold.addEventListener('click', () => {
      const open = form.classList.toggle('open');
      fold.setAttribute('aria-expanded', String(open));
    });
    let timer = 0;
    form.addEventListener('input', (event) => {
      clearTimeout(timer);
      const { name, value } = event.target;
      timer = setTimeout(() => { filters.set({ [name]: value.trim(), cell: '' }); this.app.refresh(); }, event.target.tagName === 'SELECT' ? 0 : 120);
    });
    form.addEventListener('submit', (event) => event.preventDefault());
    form.querySelector('#clear').addEventListener('click', () => { filters.clear(); this.app.refresh(); });
  }

  refresh() {
    const { data, filters } = this;
    for (const element of document.getElementById('fields').elements) {
      if (!element.name || element === document.activeElement) continue;
      const value = filters.get(element.name);
      if (element.tagName === 'SELECT' && value && ![...element.options].some((option) => option.value === value)) {
        element.append(make('option', { value }, value)); // a case's whole name, say, out of an address
      }
      element.value = value;
    }
    document.getElementById('clear').disabled = !filters.active;
    document.getElementById('fold').textContent = filters.active ? 'Filters (on)' : 'Filters';
    const counts = new Map();
    for (const trial of filters.trials(['v'])) counts.set(data.word(trial), (counts.get(data.word(trial)) || 0) + 1);
    const all = new Set(data.raw.verdict.map((verdict) => data.words[verdict]));
    const order = [...data.raw.failures, ...data.raw.harmless].filter((word) => all.has(word));
    this.chips('chips', 'v', order.map((word) => ({
      value: word, label: word, count: counts.get(word) || 0, lead: mark(data, word, false), kind: `v-${slug(word)}`,
    })));
    if (!data.diff) return;
    const states = new Map();
    for (const trial of filters.trials(['c'])) states.set(data.state(trial), (states.get(data.state(trial)) || 0) + 1);
    if (!filters.get('c').length) {
      // Those that are gone are not among the trials unless asked for, yet the chip says how many there are.
      data.diff.state.forEach((state) => {
        if (data.diff.states[state] === 'gone') states.set('gone', (states.get('gone') || 0) + 1);
      });
    }
    document.getElementById('states').hidden = false;
    const torch = data.diff.oldVersions.torch;
    this.chips('states', 'c', data.diff.states.map((state, at) => ({
      value: state, label: state, count: states.get(state) || 0, title: data.diff.meaning[at], kind: `state-${slug(state)}`,
    })).filter((chip) => chip.count || filters.get('c').includes(chip.value)), torch ? `Since torch ${torch}:` : 'Since the old run:');
  }

  chips(place, name, chips, lead) {
    const { filters } = this;
    const focused = document.activeElement && document.activeElement.dataset.chip;
    const holder = document.getElementById(place);
    holder.replaceChildren(...(lead ? [make('span', { class: 'chips-lead' }, lead)] : []), ...chips.map((chip) => {
      const pressed = filters.get(name).includes(chip.value);
      return make(
        'button',
        { type: 'button', class: `chip ${chip.kind}${chip.count ? '' : ' none'}`, 'aria-pressed': String(pressed), title: chip.title, data: { chip: `${name}:${chip.value}` },
          onclick: () => { filters.toggle(name, chip.value); filters.set({ cell: '' }); this.app.refresh(); } },
        chip.lead || null, make('span', {}, chip.label), make('b', {}, count(chip.count)),
      );
    }));
    if (focused) {
      const again = [...holder.children].find((chip) => chip.dataset.chip === focused);
      if (again) again.focus();
    }
  }
}
