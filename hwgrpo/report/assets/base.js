"use strict";
// Elements, numbers as text, and the marks that belong to all of the page. Text from the run always becomes a text
// node or an attribute value: nothing in these files turns a string into markup.

const NONE = "–";
const SVG = "http://www.w3.org/2000/svg";

/** Make an element: attributes, `on*` handlers, then children (strings become text). */
function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, text]) => element.style.setProperty(key, text));
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function readData(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

/** Four significant digits, thousands separated; very large and very small ones as 1.2e-7. */
function formatNumber(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value) || size >= 10000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

function formatSigned(value, digits = 2) {
  if (value === null || value === undefined) return NONE;
  const text = Math.abs(value).toFixed(digits);
  if (Number(text) === 0) return text;
  return (value > 0 ? "+" : "−") + text;
}

/** A reward: three decimals, so that numbers beside each other compare. */
function formatScore(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  return size >= 0.0005 && size < 100 ? value.toFixed(3) : formatNumber(value);
}

function formatShare(value) {
  if (value === null || value === undefined) return NONE;
  const percent = 100 * value;
  if (percent === 0) return "0 %";
  if (Math.abs(percent) < 0.01) return percent.toExponential(1) + " %";
  return Number(percent.toPrecision(3)) + " %";
}

/** 42 ms, 3.2 s, 2 min 14 s, 3 h 05 min. */
function formatSeconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.001) return Number((1e6 * value).toPrecision(2)) + " µs";
  if (value < 1) return Number((1000 * value).toPrecision(3)) + " ms";
  if (value < 60) return Number(value.toPrecision(3)) + " s";
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  const hours = Math.round(value / 3600);
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function formatGib(value) {
  return value === null || value === undefined ? NONE : formatNumber(value) + " GiB";
}

function formatTokens(value) {
  return formatNumber(value === null || value === undefined ? value : Math.round(value * 10) / 10);
}

/** Call `run` once `wait` ms have passed without another call. */
function debounce(wait, run) {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...words), wait);
  };
}

function lastValue(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return null;
}

function plural(count, word) {
  return `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;
}
