// The bit explorer in the page: the twin of book/bit_arithmetic.py and of render() in
// book/bit_explorer.py, with BigInt. Same names, same order; tests compare the two.
var BitExplorer = (function () {
  "use strict";
  const DRAWS = 1024n, MAX_COLUMNS = 34;
  const MODE_WORDS = {
    nearest_even: "to nearest, ties to even",
    nearest_away: "to nearest, ties away from zero",
    toward_zero: "toward zero",
    stochastic: "stochastically",
  };

  function parseFormat(text, table) {
    const [base, bits] = text.split(".");
    const [exponentBits, fraction, finiteOnly] = table[base];
    const bias = 2 ** (exponentBits - 1) - 1;
    const fractionBits = bits === undefined ? fraction : Number(bits);
    const name = fractionBits === fraction ? base : text;
    return {
      name, exponentBits, fractionBits, finiteOnly, bias,
      emin: 1 - bias, emax: finiteOnly ? bias + 1 : bias,
    };
  }

  const bitLength = (n) => (n ? n.toString(2).length : 0);
  const left = (n, k) => n << BigInt(k);
  const right = (n, k) => n >> BigInt(k);
  const low = (n, k) => n & ((1n << BigInt(k)) - 1n);

  function strip(magnitude, exponent) {
    if (!magnitude) return [0n, 0];
    const text = magnitude.toString(2);
    const zeros = text.length - 1 - text.lastIndexOf("1");
    return [right(magnitude, zeros), exponent + zeros];
  }

  function dyadic(value) {
    const view = new DataView(new ArrayBuffer(8));
    view.setFloat64(0, value);
    const bits = view.getBigUint64(0);
    const field = Number(right(bits, 52) & 0x7ffn);
    const fraction = low(bits, 52);
    return field ? [fraction | (1n << 52n), field - 1075] : [fraction, -1074];
  }

  function readNumber(text, stored) {
    text = text.trim();
    const width = 1 + stored.exponentBits + stored.fractionBits;
    const digits = text.startsWith("0b") ? text.slice(2) : text;
    if (/^[01]+$/.test(digits) && (digits.length === width || text.startsWith("0b"))) {
      return readBits(digits, stored, width);
    }
    if (!/^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/.test(text)) {
      throw new Error(`'${text}' is neither a decimal number nor ${width} bits of ${stored.name}`);
    }
    const value = Number(text);
    if (!Number.isFinite(value)) {
      throw new Error(`'${text}' is too large; use a number below 1.8e308`);
    }
    const sign = value < 0 || Object.is(value, -0) ? 1 : 0;
    const done = roundDyadic(...dyadic(Math.abs(value)), stored, "nearest_even", 0);
    if (done.overflow || done.saturated) {
      throw new Error(`'${text}' is beyond the largest ${stored.name} number`);
    }
    return [sign, ...strip(...done.rounded)];
  }

  function readBits(digits, fmt, width) {
    if (digits.length !== width) {
      throw new Error(`${digits.length} bits are not ${width}, the width of ${fmt.name}`);
    }
    const field = parseInt(digits.slice(1, 1 + fmt.exponentBits), 2);
    let fraction = BigInt("0b0" + digits.slice(1 + fmt.exponentBits));
    const top = field === 2 ** fmt.exponentBits - 1;
    if (top && (!fmt.finiteOnly || fraction === left(1n, fmt.fractionBits) - 1n)) {
      throw new Error(`${digits} is infinity or NaN in ${fmt.name}; use a finite number`);
    }
    if (field) fraction += left(1n, fmt.fractionBits);
    const exponent = Math.max(field, 1) - fmt.bias - fmt.fractionBits;
    return [Number(digits[0]), ...strip(fraction, exponent)];
  }

  function roundDyadic(magnitude, exponent, fmt, mode, draw) {
    const lead = magnitude ? bitLength(magnitude) - 1 + exponent : fmt.emin;
    const place = Math.max(lead, fmt.emin);
    const unit = place - fmt.fractionBits;
    let drop = unit - exponent;
    if (drop <= 0) {
      magnitude = left(magnitude, -drop);
      drop = 0;
    }
    const kept = right(magnitude, drop), rest = low(magnitude, drop);
    const guard = drop ? Number(right(rest, drop - 1) & 1n) : 0;
    const sticky = drop > 1 && low(rest, drop - 1) !== 0n ? 1 : 0;
    // without fraction bits the even neighbour is the one with the even exponent field
    const odd = fmt.fractionBits || !kept ? Number(kept & 1n) : (place + fmt.bias) & 1;
    const up = {
      nearest_even: guard && (sticky || odd) ? 1n : 0n,
      nearest_away: BigInt(guard),
      toward_zero: 0n,
      stochastic: left(BigInt(draw), drop) < rest * DRAWS ? 1n : 0n,
    }[mode];
    let rounded = [kept + up, unit], saturated = false;
    const full = left(2n, fmt.fractionBits) - (fmt.finiteOnly ? 2n : 1n);
    const top = [full, fmt.emax - fmt.fractionBits];
    let overflow =
      left(rounded[0], Math.max(unit - top[1], 0)) > left(top[0], Math.max(top[1] - unit, 0));
    if (overflow && (fmt.finiteOnly || mode === "toward_zero")) {
      rounded = top;
      saturated = true;
      overflow = false;
    }
    return {
      place, unit, kept, rest, drop, guard, sticky, tie: Boolean(guard && !sticky), odd,
      up: up === 1n, rounded, saturated, overflow,
    };
  }

  const binary = (n, width) => (width ? n.toString(2).padStart(width, "0") : "");

  function pattern(sign, magnitude, unit, fmt, overflow) {
    let field, fraction;
    if (overflow) {
      field = 2 ** fmt.exponentBits - 1;
      fraction = 0n;
    } else {
      const lead = magnitude ? bitLength(magnitude) - 1 + unit : fmt.emin;
      const place = Math.max(lead, fmt.emin);
      const shift = unit - (place - fmt.fractionBits);
      const significand = shift >= 0 ? left(magnitude, shift) : right(magnitude, -shift);
      field = right(significand, fmt.fractionBits) ? place + fmt.bias : 0;
      fraction = low(significand, fmt.fractionBits);
    }
    const text = `${sign} ${binary(field, fmt.exponentBits)}`;
    return fmt.fractionBits ? `${text} ${binary(fraction, fmt.fractionBits)}` : text;
  }

  function toDouble(magnitude, exponent) {
    const extra = bitLength(magnitude) - 64; // keep 64 bits, the last one sticky: one rounding
    if (extra > 0) {
      const sticky = low(magnitude, extra) ? 1n : 0n;
      magnitude = right(magnitude, extra) | sticky;
      exponent += extra;
    }
    const half = Math.floor(exponent / 2); // two steps: 2**-1074 is not a normal number
    return Number(magnitude) * 2 ** half * 2 ** (exponent - half);
  }

  function number(magnitude, exponent, sign) {
    const minus = sign ? "-" : "";
    [magnitude, exponent] = strip(magnitude, exponent);
    if (!magnitude) return minus + "0";
    const length = bitLength(magnitude);
    if (length + exponent > 1024) return minus + "more than 1.8e308";
    const [mantissa, power] = toDouble(magnitude, exponent).toExponential().split("e");
    const digits = mantissa.replace(".", ""), point = Number(power) + 1;
    const plain = -5 < point && point <= 17;
    let whole, fraction;
    if (plain) {
      whole = point > 0 ? digits.slice(0, point).padEnd(point, "0") : "0";
      fraction = point > 0 ? digits.slice(point) : "0".repeat(-point) + digits;
    } else {
      [whole, fraction] = [digits[0], digits.slice(1)];
    }
    let text = whole + (fraction ? "." + fraction : "");
    if (!plain) text += `e${point - 1}`;
    return (length <= 53 ? "" : "≈ ") + minus + text;
  }

  function ulps(numerator, drop) {
    if (!numerator) return "0";
    const size = numerator < 0n ? -numerator : numerator;
    const scaled = right(size * 2000000n + left(1n, drop), drop + 1);
    const sign = numerator < 0n ? "-" : "+";
    if (!scaled) return sign + "less than 0.000001";
    return `${sign}${scaled / 1000000n}.${String(scaled % 1000000n).padStart(6, "0")}`;
  }

  function explore(state, table) {
    const stored = parseFormat(state.stored, table), target = parseFormat(state.target, table);
    if (state.addends.length < 2 || state.addends.length > 3) {
      throw new Error("give two or three addends");
    }
    const addends = state.addends.map((text) => readNumber(text, stored));
    const { mode, draw, accumulator } = state;
    const terms = addends.map((value, i) => ["abc"[i], value]);
    let plan;
    if (accumulator === "exact") {
      plan = [[terms, target, mode]];
    } else {
      const between =
        accumulator === "fp32" ? [parseFormat("fp32", table), "nearest_even"] : [target, mode];
      plan = terms.slice(1).map((term) => [[term], ...between]);
      if (accumulator === "fp32") plan.push([[], target, mode]);
      plan[0][0].unshift(terms[0]);
    }
    const steps = [];
    let carried = null;
    for (const [more, fmt, how] of plan) {
      const [step, value] = makeStep(carried ? [["sum so far", carried], ...more] : more, fmt, how, draw);
      steps.push(step);
      carried = value;
      if (step.overflow) break;
    }
    return {
      addends: addends.map(([s, m, e], i) => ({
        name: "abc"[i], value: number(m, e, s), bits: pattern(s, m, e, stored),
      })),
      stored: stored.name,
      steps,
      total: total(addends, steps[steps.length - 1], carried, target),
    };
  }

  function exactSum(values) {
    const exponents = values.filter((v) => v[1]).map((v) => v[2]);
    const bottom = exponents.length ? Math.min(...exponents) : 0;
    let sum = 0n;
    for (const [s, m, e] of values) if (m) sum += left(s ? -m : m, e - bottom);
    const sign = sum < 0n || (!sum && values.every((v) => v[0])) ? 1 : 0;
    return [sign, sum < 0n ? -sum : sum, bottom];
  }

  function makeStep(terms, fmt, mode, draw) {
    const [sign, magnitude, exponent] = exactSum(terms.map((t) => t[1]));
    const done = roundDyadic(magnitude, exponent, fmt, mode, draw);
    const { kept, unit, drop } = done;
    const leadOf = (m, e) => bitLength(m) - 1 + e;
    const leads = terms.filter((t) => t[1][1]).map(([, [, m, e]]) => leadOf(m, e));
    const before = leads.length ? Math.max(...leads) : done.place;
    const lead = magnitude ? leadOf(magnitude, exponent) : before;
    const top = Math.max(before, lead, done.place);
    const bottom = Math.max(
      Math.min(exponent, unit - 1), Math.min(top - MAX_COLUMNS + 1, unit - 2));
    const error = left(done.up ? 1n : 0n, drop) - done.rest;
    let result = number(...done.rounded, sign);
    if (done.overflow) result = sign ? "-infinity" : "infinity";
    const step = {
      format: fmt.name,
      width: fmt.fractionBits + 1,
      mode,
      top,
      bottom,
      folded: Math.max(bottom - exponent, 0),
      rows: terms.map(([name, [s, m, e]]) => bitRow(name, s, m, e, top, bottom)),
      sum: bitRow("sum", sign, magnitude, exponent, top, bottom),
      shifts: terms.map(([, [, m, e]]) => (m ? before - leadOf(m, e) : 0)),
      before,
      lead,
      zero: !magnitude,
      place: done.place,
      unit,
      ulp: number(1n, unit, 0),
      guard: done.guard,
      sticky: done.sticky,
      tie: done.tie,
      odd: done.odd,
      up: done.up,
      dropped: ulps(done.rest, drop),
      tenths: Number(right(done.rest * 3000n, drop)),
      below: number(kept, unit, sign),
      above: number(kept + 1n, unit, sign),
      overflow: done.overflow,
      saturated: done.saturated,
      result,
      pattern: pattern(sign, ...done.rounded, fmt, done.overflow),
      error: ulps(sign ? -error : error, drop),
    };
    return [step, [sign, ...strip(...done.rounded)]];
  }

  function bitRow(name, sign, magnitude, exponent, top, bottom) {
    const shift = bottom - exponent;
    const shown = shift >= 0 ? right(magnitude, shift) : left(magnitude, -shift);
    const rest = shift > 0 && low(magnitude, shift) ? 1 : 0;
    const value = number(magnitude, exponent, sign);
    return { name, value, sign, bits: binary(shown, top - bottom + 1), rest };
  }

  function total(addends, last, stored, target) {
    const [sign, magnitude, exponent] = exactSum(addends);
    const out = {
      target: target.name,
      exact: number(magnitude, exponent, sign),
      result: last.result,
      pattern: last.pattern,
    };
    if (last.overflow) return { ...out, difference: null, error: null };
    const [s, m, e] = stored;
    const bottom = Math.min(exponent, e);
    const exact = left(sign ? -magnitude : magnitude, exponent - bottom);
    const difference = left(s ? -m : m, e - bottom) - exact;
    const ulp = roundDyadic(magnitude, exponent, target, "toward_zero", 0).unit;
    const scaled = left(difference, Math.max(bottom - ulp, 0));
    const size = difference < 0n ? -difference : difference;
    return {
      ...out,
      difference: number(size, bottom, difference < 0n ? 1 : 0),
      error: ulps(scaled, Math.max(ulp - bottom, 0)),
    };
  }

  // -- drawing: render() and summary() of book/bit_explorer.py ----------------------------------

  const plus = (text) => text.replace(/^\+/, "");

  function sentences(step) {
    const said = [];
    const moved = step.rows
      .map((r, i) => [r.name, step.shifts[i]])
      .filter((pair) => pair[1])
      .map(([name, n]) => `${name} by ${n}`);
    if (step.rows.length > 1) {
      said.push(
        moved.length
          ? `Align: shift right ${moved.join(", ")}.`
          : `Align: the leading bits stand at 2^${step.before} already; nothing shifts.`);
      const move = step.lead - step.before;
      if (step.zero) said.push("Add: the sum is exactly zero.");
      else if (move > 0) {
        said.push(
          `Add: the significand overflows into 2^${step.lead}; ` +
            `shift right by ${move}, exponent + ${move}.`);
      } else if (move < 0) {
        said.push(`Add: leading bits cancel; shift left by ${-move}, exponent - ${-move}.`);
      } else said.push(`Add: the leading bit stays at 2^${step.lead}; no shift.`);
    }
    if (step.place > step.lead) {
      said.push(`Below the smallest normal ${step.format} number: a subnormal result.`);
    }
    said.push(
      `Keep ${step.width} bits, down to 2^${step.unit} (one ulp = ${step.ulp}). ` +
        `Guard bit ${step.guard}, sticky bit ${step.sticky}: ${dropped(step)}.`);
    said.push(decision(step));
    return said;
  }

  function dropped(step) {
    if (step.dropped === "0") return "nothing is dropped, the sum is representable";
    const where = !step.guard ? "below" : step.tie ? "an exact tie at" : "above";
    return `${plus(step.dropped)} ulp is dropped, ${where} the midpoint`;
  }

  function decision(step) {
    if (step.overflow) return `Beyond the largest ${step.format} number: ${step.result}.`;
    if (step.saturated) {
      return `Beyond the largest ${step.format} number, which is kept: ${step.result}.`;
    }
    if (step.dropped === "0") return `Stored as ${step.result}, error 0.`;
    let why = "";
    if (step.tie && step.mode === "nearest_even") {
      why = `, because the last kept bit is ${step.odd} (${step.odd ? "odd" : "even"})`;
    }
    const way = step.up ? "up in size" : "down in size";
    return `Rounded ${way}${why}: ${step.result}, error ${step.error} ulp.`;
  }

  function summary(trace) {
    const t = trace.total;
    const text = `Result in ${t.target}: ${t.result} (bits ${t.pattern})`;
    if (t.error === null) return `${text}; the exact sum is ${t.exact}.`;
    return `${text}; exact sum ${t.exact}; error ${t.difference} = ${t.error} ulp.`;
  }

  function render(trace) {
    const stored = trace.addends
      .map((a) => `<div>${a.name} = ${a.value} <code>${a.bits}</code></div>`).join("");
    const parts = [`<div class="bx-stored">Stored in ${trace.stored}: ${stored}</div>`];
    trace.steps.forEach((step, i) => {
      const what = step.rows.map((r) => r.name).join(" + ");
      const head = `Step ${i + 1} of ${trace.steps.length}: ${what}, rounded to ${step.format}`;
      const items = sentences(step).map((s) => `<li>${s}</li>`).join("");
      parts.push(
        `<div class="bx-step"><div class="bx-head">${head} ${MODE_WORDS[step.mode]}</div>` +
          `<div class="bx-scroll">${grid(step)}</div>` +
          `<ol>${items}</ol><div class="bx-scroll">${line(step)}</div></div>`);
    });
    return parts.join("");
  }

  function grid(step) {
    const { top, bottom, unit } = step;
    const places = Array.from({ length: top - bottom + 1 }, (_, i) => top - i);
    const marks = places.map((p) => `<i>${p % 4 === 0 ? p : ""}</i>`).join("");
    const lines = [cells("place 2^", "<i></i>" + marks, "<i></i>", "bx-place")];
    for (const row of step.rows) lines.push(bits(row, places.map(() => ""), ""));
    const kinds = places.map((p) =>
      p > step.place ? "" : p >= unit ? "k" : p === unit - 1 ? "g" : "s");
    lines.push(bits(step.sum, kinds, "bx-sum"));
    if (step.before !== step.place) {
      lines.push(windowRow("window before the shift", places, step.before, step.width));
    }
    lines.push(windowRow("kept bits", places, step.place, step.width));
    const signed = (r) => `${r.sign ? "-" : "+"}${r.bits}`;
    const told = step.rows.map((r) => `${r.name} ${signed(r)}`).join("; ");
    const label =
      `Bits from place 2^${top} to 2^${bottom}: ${told}; sum ${signed(step.sum)}. ` +
      `Kept: 2^${step.place} to 2^${unit}; guard ${step.guard}, sticky ${step.sticky}.`;
    const key =
      '<div class="bx-key"><i class="k">1</i> kept <i class="g">1</i> guard bit ' +
      '<i class="s">1</i> sticky: the OR of these' +
      (step.folded ? `; … stands for ${step.folded} more places` : "") + "</div>";
    return `<div class="bx-grid" role="img" aria-label="${label}">${lines.join("")}</div>${key}`;
  }

  function cells(label, inner, end, kind) {
    return `<div class="bx-row ${kind}"><b>${label}</b>${inner}${end}</div>`;
  }

  function bits(row, kinds, kind) {
    let inner = `<i>${row.sign ? "-" : "+"}</i>`, seen = false;
    [...row.bits].forEach((bit, i) => {
      seen = seen || bit === "1";
      inner += `<i class="${kinds[i]}${seen ? "" : " z"}">${bit}</i>`;
    });
    return cells(row.name, inner, row.rest ? '<i class="s">…</i>' : "<i></i>", kind);
  }

  function windowRow(label, places, first, width) {
    const inner = places
      .map((p) => `<i class="${first >= p && p > first - width ? "w" : ""}"></i>`).join("");
    return cells(label, "<i></i>" + inner, "<i></i>", "bx-window");
  }

  function line(step) {
    if (step.dropped === "0" || step.overflow || step.saturated) return "";
    const x = `${60 + Math.floor(step.tenths / 10)}.${step.tenths % 10}`;
    const end = step.up ? 360 : 60;
    const label =
      `Number line from ${step.below} to ${step.above}: the sum lies ` +
      `${plus(step.dropped)} of the way and goes to ${step.result}.`;
    return (
      `<svg class="bx-line" viewBox="0 0 420 74" role="img" aria-label="${label}">` +
      '<path d="M60 40H360M60 33V47M360 33V47" class="a"/><path d="M210 35V45" class="m"/>' +
      `<path d="M${x} 40Q${x} 8 ${end} 28" class="t"/><circle cx="${x}" cy="40" r="5" class="p"/>` +
      `<circle cx="${end}" cy="40" r="6" class="r"/>` +
      `<text x="60" y="64">${step.below}</text><text x="360" y="64">${step.above}</text>` +
      `<text x="210" y="64">midpoint</text><text x="${x}" y="24">sum</text></svg>`);
  }

  // -- the form ----------------------------------------------------------------------------------

  function mount(key, setup) {
    const root = document.getElementById(key);
    const form = root.querySelector("form"), field = form.elements;
    const status = root.querySelector(".bx-result"), picture = root.querySelector(".bx-picture");

    function fill(state) {
      const [base, cut] = state.target.split(".");
      ["a", "b", "c"].forEach((name, i) => (field[name].value = state.addends[i] || ""));
      for (const name of ["stored", "mode", "accumulator", "draw"]) field[name].value = state[name];
      field.target.value = base;
      field.bits.max = setup.formats[base][1];
      field.bits.value = cut === undefined ? setup.formats[base][1] : cut;
    }

    function read() {
      const base = field.target.value, most = setup.formats[base][1];
      const cut = Math.min(Math.max(Math.trunc(Number(field.bits.value)) || 0, 0), most);
      const addends = ["a", "b", "c"].map((n) => field[n].value).filter((t) => t.trim());
      return {
        addends,
        stored: field.stored.value,
        target: cut === most ? base : `${base}.${cut}`,
        mode: field.mode.value,
        accumulator: field.accumulator.value,
        draw: Number(field.draw.value),
      };
    }

    function update() {
      field.draw.disabled = field.mode.value !== "stochastic";
      try {
        const trace = explore(read(), setup.formats);
        status.textContent = summary(trace);
        picture.innerHTML = render(trace);
      } catch (error) {
        status.textContent = error.message;
        picture.innerHTML = "";
      }
    }

    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => {
      if (event.target === field.example) {
        if (field.example.value) fill(setup.examples[field.example.value]);
      } else {
        field.example.value = "";
        if (event.target === field.target) {
          field.bits.max = field.bits.value = setup.formats[field.target.value][1];
        }
      }
      update();
    });
    form.hidden = false;
    update();
  }

  return { explore, summary, render, mount };
})();
