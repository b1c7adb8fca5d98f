// Errors: how far right and wrong lie apart, and each quantity's error against its noise.

const LOW = -18;
const HIGH = 4;
// Judged wrong over five times the noise, in L2: see the page on how verdicts are judged.
const NOISE_LIMIT = 5;

class Plot {
  constructor(app) {
    this.app = app;
    this.data = app.data;
  }

  render(trials) {
    const parts = [make('p', { class: 'lead' }, 'Relative error: the L2 norm of the difference over the norm of the reference. Rounding sits at the left, faults at the right; what lies between deserves a look.'), this.histogram(trials)];
    const points = this.points(trials);
    if (points.length) parts.push(...this.scatter(points));
    else parts.push(make('p', { class: 'muted' }, 'These trials have no measured noise: in float64 a limit on the relative error is enough.'));
    return make('div', { class: 'plots' }, parts);
  }

  histogram(trials) {
    const { data } = this;
    const step = 0.5;
    const bins = Array.from({ length: (HIGH - LOW) / step }, () => ({ right: 0, wrong: 0 }));
    const zero = { right: 0, wrong: 0 };
    const infinite = { right: 0, wrong: 0 };
    const add = (hundredths, kind) => {
      if (hundredths === null || hundredths === undefined) return;
      if (hundredths >= 9999) infinite[kind] += 1;
      else if (hundredths <= -9999) zero[kind] += 1;
      else bins[Math.min(Math.max(Math.floor((hundredths / 100 - LOW) / step), 0), bins.length - 1)][kind] += 1;
    };
    for (const trial of trials) {
      if (!data.failed(trial)) { add(data.raw.error[trial], 'right'); continue; }
      for (const finding of data.findings(trial)) {
        if (typeof finding.relative === 'string') add(9999, 'wrong');
        else if (finding.relative) add(Math.round(100 * Math.log10(Math.abs(finding.relative))), 'wrong');
      }
    }
    const all = [zero, ...bins, infinite];
    const most = Math.max(1, ...all.map((bin) => bin.right + bin.wrong));
    const [width, height, left, bottom, top] = [860, 240, 46, 34, 10];
    const barWidth = (width - left) / all.length;
    // The square root keeps a bin of one in sight beside a bin of thousands.
    const scale = (number) => (Math.sqrt(number) / Math.sqrt(most)) * (height - bottom - top);
    const label = (at) => (at === 0 ? 'exactly 0' : at === all.length - 1 ? 'not finite' : `1e${(LOW + (at - 1) * step).toFixed(1).replace('.0', '')} to 1e${(LOW + at * step).toFixed(1).replace('.0', '')}`);
    const bars = all.flatMap((bin, at) => {
      const x = left + at * barWidth;
      const both = scale(bin.right + bin.wrong);
      const wrong = bin.right + bin.wrong ? (both * bin.wrong) / (bin.right + bin.wrong) : 0;
      const title = `${label(at)}: ${count(bin.right)} trials right, ${count(bin.wrong)} quantities wrong`;
      if (!bin.right && !bin.wrong) return [];
      return [
        svg('g', { class: 'bar' }, svg('title', {}, title),
          svg('rect', { class: 'right', x: x + 1, y: height - bottom - both, width: barWidth - 2, height: Math.max(both - wrong, 0) }),
          svg('rect', { class: 'wrong', x: x + 1, y: height - bottom - wrong, width: barWidth - 2, height: wrong })),
      ];
    });
    const ticks = [];
    for (let power = LOW + 2; power < HIGH; power += 2) {
      const x = left + barWidth + ((power - LOW) / step) * barWidth;
      ticks.push(svg('line', { class: 'tick', x1: x, x2: x, y1: height - bottom, y2: height - bottom + 5 }), svg('text', { x, y: height - bottom + 17, 'text-anchor': 'middle' }, `1e${power}`));
    }
    const grid = [most, most / 4].filter((value) => value >= 1).flatMap((value) => {
      const y = height - bottom - scale(value);
      return [svg('line', { class: 'grid', x1: left, x2: width, y1: y, y2: y }), svg('text', { x: left - 6, y: y + 4, 'text-anchor': 'end' }, count(Math.round(value)))];
    });
    // Where rounding ends and a fault begins, for the dtypes among these trials.
    const dtypes = [...new Set(trials.map((trial) => data.group(trial).dtype))];
    const limits = dtypes.map((dtype) => [dtype, data.raw.limits[dtype]]).filter(([, limit]) => limit > 0).map(([dtype, limit]) => {
      const x = left + barWidth + ((Math.log10(limit) - LOW) / step) * barWidth;
      return svg('g', { class: 'limit' }, svg('line', { x1: x, x2: x, y1: top, y2: height - bottom }), svg('text', { x: x + 5, y: top + 10 }, `limit in ${dtype}`));
    });
    const rights = all.reduce((sum, bin) => sum + bin.right, 0);
    const wrongs = all.reduce((sum, bin) => sum + bin.wrong, 0);
    return make(
      'figure', {},
      make('figcaption', {}, make('span', { class: 'key right' }), `largest error of each trial that is right (${count(rights)}) `, make('span', { class: 'key wrong' }), `error of each quantity that is wrong (${count(wrongs)})`),
      make('div', { class: 'wide-scroll' }, svg('svg', { viewBox: `0 0 ${width} ${height}`, class: 'histogram', role: 'img', 'aria-label': `Histogram of relative errors: ${rights} trials right, ${wrongs} quantities wrong` },
        grid, svg('line', { class: 'axis', x1: left, x2: width, y1: height - bottom, y2: height - bottom }), bars, limits, ticks,
        svg('text', { x: left + barWidth / 2, y: height - bottom + 17, 'text-anchor': 'middle' }, '0'), svg('text', { x: width - barWidth / 2, y: height - bottom + 17, 'text-anchor': 'middle' }, '∞'),
        svg('text', { x: width, y: height - 2, 'text-anchor': 'end', class: 'title' }, 'relative error'))),
    );
  }

  points(trials) {
    const found = [];
    for (const trial of trials) {
      for (const one of this.data.noise(trial)) {
        if (one.error === null || one.noise === null || one.noise <= -9999) continue;
        found.push({ trial, ...one, ratio: one.error >= 9999 ? Infinity : one.error <= -9999 ? -Infinity : one.error - one.noise });
      }
    }
    return found;
  }

  scatter(points) {
    const { data } = this;
    const finite = (value) => value > -9999 && value < 9999;
    const range = (values) => {
      const inside = values.filter(finite);
      return [Math.floor(Math.min(...minmax(inside)) / 100) - 1, Math.ceil(Math.max(...minmax(inside)) / 100) + 1];
    };
    const [x0, x1] = range(points.map((point) => point.noise));
    const [y0, y1] = range(points.map((point) => point.error));
    const canvas = make('canvas', { class: 'scatter', tabindex: '0', role: 'img', 'aria-label': `${points.length} quantities: relative error against noise; the table below lists the largest ratios` });
    const over = points.filter((point) => point.ratio > 100 * Math.log10(NOISE_LIMIT));
    const [left, bottom, top, right] = [64, 44, 12, 26];
    let width = 860;
    const height = 420;
    const x = (hundredths) => left + ((hundredths / 100 - x0) / (x1 - x0)) * (width - left - right);
    const y = (hundredths) => height - bottom - ((Math.min(Math.max(hundredths / 100, y0), y1) - y0) / (y1 - y0)) * (height - bottom - top);
    const draw = () => {
      width = Math.max(canvas.clientWidth, 320);
      const density = window.devicePixelRatio || 1;
      canvas.width = width * density;
      canvas.height = height * density;
      const pen = canvas.getContext('2d');
      pen.scale(density, density);
      const style = getComputedStyle(document.body);
      const colour = (name) => style.getPropertyValue(name).trim();
      pen.clearRect(0, 0, width, height);
      pen.font = '12px system-ui, sans-serif';
      pen.fillStyle = colour('--muted');
      pen.strokeStyle = colour('--line');
      pen.lineWidth = 1;
      const every = (from, to) => Math.max(1, Math.ceil((to - from) / 10));
      pen.textAlign = 'center';
      for (let power = x0; power <= x1; power += every(x0, x1)) {
        pen.beginPath(); pen.moveTo(x(power * 100), top); pen.lineTo(x(power * 100), height - bottom); pen.stroke();
        pen.fillText(`1e${power}`, x(power * 100), height - bottom + 16);
      }
      pen.textAlign = 'right';
      for (let power = y0; power <= y1; power += every(y0, y1)) {
        pen.beginPath(); pen.moveTo(left, y(power * 100)); pen.lineTo(width - right, y(power * 100)); pen.stroke();
        pen.fillText(`1e${power}`, left - 8, y(power * 100) + 4);
      }
      pen.textAlign = 'center';
      pen.fillStyle = colour('--text');
      pen.fillText('noise', left + (width - left - right) / 2, height - 8);
      pen.save(); pen.translate(14, top + (height - bottom - top) / 2); pen.rotate(-Math.PI / 2); pen.fillText('relative error', 0, 0); pen.restore();
      pen.save();
      pen.beginPath(); pen.rect(left, top, width - left - right, height - bottom - top); pen.clip();
      for (const [factor, text] of [[1, 'error = noise'], [NOISE_LIMIT, `${NOISE_LIMIT} × noise`]]) {
        const shift = 100 * Math.log10(factor);
        pen.strokeStyle = colour(factor === 1 ? '--muted' : '--bad');
        pen.setLineDash(factor === 1 ? [4, 4] : []);
        pen.beginPath();
        pen.moveTo(x(x0 * 100), height - bottom - ((x0 + shift / 100 - y0) / (y1 - y0)) * (height - bottom - top));
        pen.lineTo(x(x1 * 100), height - bottom - ((x1 + shift / 100 - y0) / (y1 - y0)) * (height - bottom - top));
        pen.stroke();
        pen.fillStyle = pen.strokeStyle;
        pen.textAlign = 'left';
        const at = x0 * 100 + 8;
        pen.fillText(text, x(at) + 4, factor === 1 ? y(at + shift) + 14 : y(at + shift) - 6);
      }
      pen.setLineDash([]);
      for (const failed of [false, true]) {
        for (const point of points) {
          const wrong = point.ratio > 100 * Math.log10(NOISE_LIMIT);
          if (wrong !== failed) continue;
          pen.fillStyle = colour(`--v-${slug(data.word(point.trial))}`);
          pen.globalAlpha = wrong ? 0.9 : 0.35;
          const [px, py] = [x(point.noise), y(point.error >= 9999 ? y1 * 100 - 12 : point.error <= -9999 ? y0 * 100 + 12 : point.error)];
          pen.beginPath();
          // Shape beside colour: what is over the limit is a diamond.
          if (wrong) { pen.moveTo(px, py - 5); pen.lineTo(px + 5, py); pen.lineTo(px, py + 5); pen.lineTo(px - 5, py); } else pen.arc(px, py, 2.2, 0, 7);
          pen.fill();
        }
      }
      pen.restore();
      pen.globalAlpha = 1;
    };
    const nearest = (event) => {
      const box = canvas.getBoundingClientRect();
      const [px, py] = [event.clientX - box.left, event.clientY - box.top];
      let best = null;
      let distance = 144;
      for (const point of points) {
        const away = (x(point.noise) - px) ** 2 + (y(point.error) - py) ** 2;
        if (away < distance) { distance = away; best = point; }
      }
      return best && { best, box: { left: event.clientX, top: event.clientY, bottom: event.clientY, width: 0 } };
    };
    canvas.addEventListener('mousemove', (event) => {
      const found = nearest(event);
      canvas.classList.toggle('hit', Boolean(found));
      if (!found) { tip.hide(); return; }
      const { best, box } = found;
      tip.show(box, [`${best.quantity}: ${ratioText(best)} its noise`, data.id(best.trial), data.word(best.trial)]);
    });
    canvas.addEventListener('mouseleave', () => tip.hide());
    canvas.addEventListener('click', (event) => {
      const found = nearest(event);
      if (found) this.app.openTrials([found.best.trial], found.best.quantity, found.best.trial, canvas);
    });
    this.app.redraw = draw;
    new ResizeObserver(draw).observe(canvas);
    const largest = [...points].sort((one, other) => other.ratio - one.ratio).slice(0, 12);
    const rows = largest.map((point) => make(
      'tr', {},
      make('td', { class: 'number ratio' }, ratioText(point)), make('td', {}, make('code', {}, point.quantity)), make('td', {}, badge(data, data.word(point.trial), data.known(point.trial))),
      make('td', {}, make('button', { type: 'button', class: 'link', onclick: (event) => this.app.openTrials([point.trial], point.quantity, point.trial, event.currentTarget) }, data.id(point.trial))),
    ));
    return [
      make('figure', {}, make('figcaption', {}, `Relative error of ${plural(points.length, 'quantity').replace('quantitys', 'quantities')} against the noise of the single-device run; ${count(over.length)} over ${NOISE_LIMIT} times the noise (diamonds).`), canvas),
      make('h3', {}, 'Largest ratios'),
      make('div', { class: 'wide-scroll' }, make('table', { class: 'plain-table' }, make('thead', {}, make('tr', {}, ['ratio', 'quantity', 'verdict', 'trial'].map((text) => make('th', { scope: 'col' }, text)))), make('tbody', {}, rows))),
    ];
  }
}

// Of many values; spreading them into Math.min would overflow the stack.
function minmax(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return values.length ? [low, high] : [0, 0];
}
