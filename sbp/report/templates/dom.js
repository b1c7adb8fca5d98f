// Small helpers to make elements. Text goes in as text nodes only: nothing of a result becomes markup.

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'class') element.className = value;
    else if (name === 'data') for (const [key, text] of Object.entries(value)) element.dataset[key] = text;
    else if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const slug = (word) => word.replaceAll(' ', '-');
const count = (number) => number.toLocaleString('en-US');
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? '' : 's'}`;

// A verdict's letter in its colour; the word stands beside it or in its label.
function mark(data, word, known) {
  return make('span', { class: `mark v-${slug(word)}${known ? ' known' : ''}`, 'aria-hidden': 'true' }, data.letters[word]);
}

function badge(data, word, known) {
  return make('span', { class: 'badge' }, mark(data, word, known), word, known ? make('em', {}, ' known') : null);
}

function copyButton(text, label) {
  const button = make('button', { type: 'button', class: 'copy', 'aria-label': `Copy ${label}` }, 'Copy');
  button.addEventListener('click', async () => {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Pages opened from disk may not have the clipboard; the old way still works there.
      const area = make('textarea', { class: 'offscreen' }, text);
      document.body.append(area);
      area.select();
      done = document.execCommand('copy');
      area.remove();
      button.focus();
    }
    button.textContent = done ? 'Copied' : 'Select and copy';
    setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  });
  return button;
}

function codeBox(text, label) {
  return make('div', { class: 'code' }, make('pre', { tabindex: '0', 'aria-label': label }, make('code', {}, text)), copyButton(text, label));
}

function showNumber(value) {
  if (value === null || value === undefined) return '';
  if (typeof value === 'string') return value;
  if (value === 0) return '0';
  const size = Math.abs(value);
  return size >= 0.001 && size < 10000 ? String(Number(value.toPrecision(3))) : value.toExponential(1).replace('e+', 'e');
}

const tip = {
  element: null,
  show(target, lines) {
    this.element = this.element || document.getElementById('tip');
    this.element.replaceChildren(...lines.map((line, at) => make(at ? 'div' : 'b', {}, line)));
    this.element.hidden = false;
    const box = target.getBoundingClientRect ? target.getBoundingClientRect() : target;
    const size = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left + box.width / 2 - size.width / 2), innerWidth - size.width - 8);
    const above = box.top - size.height - 8;
    this.element.style.left = `${Math.max(8, left)}px`;
    this.element.style.top = `${above > 8 ? above : Math.min(box.bottom + 8, innerHeight - size.height - 8)}px`;
  },
  hide() { if (this.element) this.element.hidden = true; },
};
