// Unpacks the data of the page: columns of numbers into dictionaries of texts.

async function unpack() {
  const packed = document.getElementById('data').textContent.trim();
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return JSON.parse(await new Response(stream).text());
}

// The trials as objects that are made when they are asked for; what is filtered on is kept in columns.
class Data {
  constructor(raw) {
    this.raw = raw;
    this.size = raw.verdict.length;
    this.words = raw.words;
    this.letters = raw.letters;
    this.failing = raw.words.map((word) => raw.failures.includes(word));
    // How grave a word is: unexpected failures are sorted and coloured by it.
    this.rank = raw.words.map((word) => raw.failures.indexOf(word));
    this.texts = raw.texts;
    this.groups = raw.groups.map((group) => {
      const [suite, subject, mesh, dtype, device, kind, options] = group.map((index) => raw.texts[index]);
      return { suite, subject, mesh, dtype, device, kind, options };
    });
    this.cases = raw.cases.map(([suite, name, short, tensors]) => ({
      suite: raw.texts[suite],
      name: raw.texts[name],
      short: raw.texts[short],
      tensors: tensors.map((index) => raw.texts[index]),
    }));
    this.diff = raw.diff || null;
    this.ids = new Map();
    this.haystacks = new Array(this.size);
  }

  word(trial) { return this.words[this.raw.verdict[trial]]; }
  failed(trial) { return this.failing[this.raw.verdict[trial]]; }
  known(trial) { return this.raw.known[trial] >= 0; }
  unexpected(trial) { return this.failed(trial) && !this.known(trial); }
  reason(trial) { return this.known(trial) ? this.texts[this.raw.known[trial]] : ''; }
  group(trial) { return this.groups[this.raw.group[trial]]; }
  case(trial) { return this.cases[this.raw.case[trial]]; }
  more(trial) { return this.raw.more[trial] || {}; }
  state(trial) { return this.diff ? this.diff.states[this.diff.state[trial]] : ''; }
  gone(trial) { return this.state(trial) === 'gone'; }

  // The tensor that a reader thinks of first: an input, not a cotangent.
  firstTensor(trial) {
    const tensors = this.case(trial).tensors;
    return tensors.find((name) => !name.startsWith('grad_')) || tensors[0];
  }

  // The placement of one tensor: 'B' on every axis of the mesh where the trial does not name it.
  placement(trial, tensor) {
    const at = this.case(trial).tensors.indexOf(tensor);
    const text = at < 0 ? '' : this.texts[this.raw.placed[trial][at]];
    return text || 'B';
  }

  // [tensor, placement] of the tensors that are not B everywhere.
  placements(trial) {
    const tensors = this.case(trial).tensors;
    const found = [];
    this.raw.placed[trial].forEach((index, at) => { if (index) found.push([tensors[at], this.texts[index]]); });
    return found;
  }

  id(trial) {
    const more = this.more(trial);
    if (more.id) return more.id;
    const group = this.group(trial);
    const placed = this.placements(trial).map(([name, sbp]) => `${name}=${sbp}`.replaceAll(' ', '')).join(',');
    const parts = [group.suite, this.case(trial).name, group.mesh, placed || 'all=B'];
    if (group.kind && group.kind !== 'forward') parts.push(group.kind);
    if (group.options) parts.push(...group.options.split(' '));
    if (group.dtype && group.dtype !== 'float64') parts.push(group.dtype);
    if (group.device && group.device !== 'cpu') parts.push(group.device);
    return parts.join('/');
  }

  // Subject and id name a trial among all.
  find(subject, id) {
    if (!this.ids.size) {
      for (let trial = 0; trial < this.size; trial += 1) {
        this.ids.set(`${this.group(trial).subject}\n${this.id(trial)}`, trial);
      }
    }
    return this.ids.get(`${subject}\n${id}`);
  }

  findings(trial) {
    const text = (index) => (index < 0 ? null : this.texts[index]);
    return (this.raw.findings[trial] || []).map(
      ([quantity, verdict, ranks, claimed, expected, largest, relative, relation, detail]) => ({
        quantity: text(quantity),
        verdict: text(verdict),
        ranks,
        claimed: text(claimed),
        expected: text(expected),
        largest,
        relative,
        relation: text(relation),
        detail: text(detail),
      }),
    );
  }

  noise(trial) {
    return (this.raw.noise[trial] || []).map(([name, error, noise]) => ({ quantity: this.texts[name], error, noise }));
  }

  // What the old run found: its word, and lines about it. The same word as now where nothing else is noted.
  old(trial) {
    if (!this.diff || this.state(trial) === 'added') return null;
    const found = this.diff.old[trial];
    if (found) return { word: this.words[found[0]], lines: this.texts[found[1]] };
    if (this.state(trial) === 'new' || this.state(trial) === 'new known') return null;
    return { word: this.word(trial), lines: '' };
  }

  // What the text filter looks in.
  haystack(trial) {
    if (this.haystacks[trial] === undefined) {
      const words = [this.id(trial), this.word(trial), this.reason(trial)];
      for (const finding of this.findings(trial)) words.push(finding.quantity, finding.relation, finding.claimed || '');
      const error = this.more(trial).error;
      if (error) words.push(error.type, error.message);
      this.haystacks[trial] = words.join('\n').toLowerCase();
    }
    return this.haystacks[trial];
  }

  // What makes two failures the same one, as in the other reports.
  failureKey(trial) {
    const [first] = this.findings(trial);
    const found = this.case(trial);
    const relation = first ? first.relation.replace(/\d+/g, '#') : '';
    const group = this.group(trial);
    return [found.suite, group.subject, found.short, this.word(trial), first ? first.quantity : '', relation].join('\n');
  }
}
