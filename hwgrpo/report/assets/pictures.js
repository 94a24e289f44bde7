// The images of a prompt, a turn or a response: thumbnails beside each other, each with the size of the image itself.

const SMALL = 64; // pixels of a side; smaller images are drawn larger, with their pixels as squares

/** Figures of the images with these indices, null for none. Images are [data URI or null, width, height]. */
function picturesOf(indices, images) {
  if (!indices || indices.length === 0) return null;
  return h("div", { class: "pictures" }, indices.map((index, place) => {
    const [source, width, height] = images[index];
    const size = width && height ? `${width.toLocaleString("en-US")} × ${height.toLocaleString("en-US")}` : "";
    const number = indices.length > 1 ? `${place + 1}: ` : "";
    const small = Math.max(width ?? 0, height ?? 0) <= SMALL;
    return h("figure", {}, source === null ? h("div", { class: "unseen muted" }, "no thumbnail")
      : h("img", { src: source, alt: `image ${place + 1}`, class: small ? "small" : null }),
    h("figcaption", { class: "muted" }, `${number}${size}`));
  }));
}
