"""Drawing pedestrians: pure functions from uniform random numbers to pixels.

A person stands in a canvas of height 1 and width 1/2, feet near y = 0.95. Every quantity depends on named uniform
numbers in [0, 1): one set per identity (for re-ID to recognise), one per camera (for re-ID to ignore), one per shot.

The only operations are + - * / sqrt, comparisons and floor, which IEEE 754 rounds correctly, without reductions of a
library: so the pixels are the same on every machine. B images, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Uniforms = Mapping[str, Floats]
Point = tuple[Floats, Floats]

IDENTITY = (
    "height", "build", "skin", "hair", "hair_tone", "hair_style",
    "top_hue", "top_sat", "top_val", "top2_hue", "top2_sat", "top2_val", "pattern", "pattern_size", "sleeve", "coat",
    "legs_hue", "legs_sat", "legs_val", "legs_kind", "shoe_val", "shoe_hue",
    "bag", "bag_hue", "bag_val", "gait",
)  # fmt: skip
"""Properties of a person: one uniform number each."""

CAMERA = (
    "wall_hue", "wall_sat", "wall_val", "floor_hue", "floor_val", "horizon", "cast_r", "cast_g", "cast_b", "light",
    "contrast", "haze", "side_light", "zoom", "blur", "post_x", "post_w", "post_val", "box_x", "box_y", "box_w",
    "box_h", "box_hue", "box_val", "tiles",
)  # fmt: skip
"""Properties of a camera and its scene."""

SHOT = (
    "x", "y", "zoom", "turn", "facing", "stride", "swing", "lean", "light", "cast", "occluder", "occ_x", "occ_y",
    "occ_val", "drift", "noise",
)  # fmt: skip
"""Properties of a single picture."""

_HAIR = ((0.07, 0.06, 0.06), (0.2, 0.12, 0.07), (0.38, 0.23, 0.12), (0.72, 0.55, 0.3), (0.55, 0.54, 0.53))


def draw_people(identity: Uniforms, camera: Uniforms, shot: Uniforms, noise: Floats, factor: int) -> NDArray[np.uint8]:
    """Draw B pedestrians: uint8 [B, 3, factor * H, factor * W], RGB.

    The names in :data:`IDENTITY`, :data:`CAMERA` and :data:`SHOT` have [B] uniform numbers each. ``noise`` of the
    sensor, [B, H, W] uniform numbers, sets the size of the drawing. ``factor``: pixels of the result per drawn pixel,
    along both axes (2 = half resolution).
    """
    canvas = _Canvas(len(noise), *noise.shape[1:])
    _draw_background(canvas, camera, shot)
    _draw_person(_Body(canvas, identity, camera, shot), identity, shot)
    _draw_occluder(canvas, shot)
    pixels = _take_photo(canvas.pixels, camera, shot, noise)
    if factor > 1:
        pixels = _box3(_box3(pixels.repeat(factor, axis=2).repeat(factor, axis=3), 2), 3)
    return (pixels * np.float32(255)).astype(np.uint8)


class _Canvas:
    """B images under construction; ``rows`` limits the work to the part of the image that a shape can touch."""

    def __init__(self, batch: int, height: int, width: int) -> None:
        self.pixels = np.zeros((batch, 3, height, width), dtype=np.float32)
        self.sharpness = np.float32(height)  # an edge is one pixel wide
        self.y = ((np.arange(height, dtype=np.float32) + np.float32(0.5)) / np.float32(height))[None, :, None]
        self.x = ((np.arange(width, dtype=np.float32) + np.float32(0.5)) / np.float32(2 * width))[None, None, :]

    def rows(self, top: float, bottom: float) -> slice:
        height = self.pixels.shape[2]
        return slice(max(0, int(top * height)), min(height, int(bottom * height) + 1))

    def coverage(self, inside: Floats) -> Floats:
        """Turn a signed distance (positive inside) into coverage in [0, 1]."""
        cover: Floats = np.clip(inside * self.sharpness + np.float32(0.5), 0, 1)
        return cover

    def paint(self, rows: slice, cover: Floats, colour: Floats) -> None:
        """Blend ``colour`` ([B, 3] or [B, 3, h, W]) over the pixels by ``cover`` [B, h, W]."""
        part = self.pixels[:, :, rows]
        full = colour[:, :, None, None] if colour.ndim == 2 else colour
        part += cover[:, None] * (full - part)


class _Body:
    """A person's coordinates (u across, v down; feet at 0.95), size and orientation."""

    def __init__(self, canvas: _Canvas, identity: Uniforms, camera: Uniforms, shot: Uniforms) -> None:
        size = (0.86 + 0.14 * identity["height"]) * (0.92 + 0.1 * camera["zoom"]) * (0.95 + 0.1 * shot["zoom"])
        self.scale = size.astype(np.float32)
        self.centre = _f32(0.25 + 0.07 * (shot["x"] - 0.5))
        self.feet = _f32(0.95 + 0.04 * (shot["y"] - 0.5))
        self.width = _f32(0.8 + 0.5 * identity["build"])
        self.turn = np.where(shot["turn"] < 0.5, -1, 1).astype(np.float32)
        self.back = shot["facing"] < 0.4
        self.side = (shot["facing"] >= 0.4) & (shot["facing"] < 0.65)
        self.canvas = canvas
        lean = _f32(0.06 * (shot["lean"] - 0.5))
        self.v = v = (canvas.y - _b(self.feet)) / _b(self.scale) + np.float32(0.95)
        self.u = ((canvas.x - _b(self.centre)) / _b(self.scale) - _b(lean) * (np.float32(0.95) - v)) * _b(self.turn)

    def limb(self, rows: slice, start: Point, end: Point, radii: Point, colour: Floats, mask: Floats | int = 1) -> None:
        """Paint a capsule with a radius at each end, where ``mask`` [B, 1, 1] is 1."""
        u, v = self.u[:, rows], self.v[:, rows]
        du, dv = _b(end[0] - start[0]), _b(end[1] - start[1])
        pu, pv = u - _b(start[0]), v - _b(start[1])
        t = np.clip((pu * du + pv * dv) / (du * du + dv * dv + np.float32(1e-6)), 0, 1)
        du, dv = pu - t * du, pv - t * dv
        radius = _b(radii[0]) + t * _b(radii[1] - radii[0])
        cover = self.canvas.coverage((radius - np.sqrt(du * du + dv * dv)) * _b(self.scale))
        self.canvas.paint(rows, cover * mask, colour)

    def ellipse(self, rows: slice, centre: Point, radii: Point) -> Floats:
        """Return the coverage of an upright ellipse."""
        eu = (self.u[:, rows] - _b(centre[0])) / _b(radii[0])
        ev = (self.v[:, rows] - _b(centre[1])) / _b(radii[1])
        smaller = np.minimum(radii[0], radii[1])
        return self.canvas.coverage((1 - np.sqrt(eu * eu + ev * ev)) * _b(smaller * self.scale))


def _draw_person(body: _Body, identity: Uniforms, shot: Uniforms) -> None:
    light, dark = np.array([0.93, 0.76, 0.65], np.float32), np.array([0.36, 0.23, 0.16], np.float32)
    skin = _f32(light + identity["skin"][:, None] * (dark - light))
    stride = _f32((shot["stride"] - 0.5) * (0.1 + 0.12 * identity["gait"]))
    swing = _f32((shot["swing"] - 0.5) * 0.16)
    rucksack = (identity["bag"] >= 0.35) & (identity["bag"] < 0.65)
    bag_colour = _colour(identity["bag_hue"], 0.7, 0.15 + 0.7 * identity["bag_val"])
    _draw_legs(body, identity, stride, skin)
    _draw_arm(body, identity, swing, skin, side=-1)
    _draw_bag(body, rucksack & body.side, bag_colour, (-0.075, 0.33), (0.042, 0.085))
    _draw_torso(body, identity)
    _draw_bag(body, rucksack & body.back, bag_colour, (0.0, 0.33), (0.06, 0.09))
    _draw_head(body, identity, skin)
    _draw_arm(body, identity, -swing, skin, side=1)
    handbag = identity["bag"] >= 0.65
    _draw_bag(body, handbag, bag_colour, (0.115, 0.56), (0.042, 0.05))
    has_strap, zero = (handbag & (identity["bag"] < 0.82)) | (rucksack & ~body.back), _f32(0 * body.width)
    ends = (-0.05 * body.width, zero + 0.2), (0.09 * body.width, zero + 0.5)
    strap_colour = bag_colour * np.float32(0.8)
    body.limb(body.canvas.rows(0.12, 0.7), *ends, (zero + 0.008, zero + 0.008), strap_colour, _b(has_strap))


def _draw_legs(body: _Body, identity: Uniforms, stride: Floats, skin: Floats) -> None:
    cloth = _colour(identity["legs_hue"], 0.75 * identity["legs_sat"], 0.12 + 0.65 * identity["legs_val"])
    shoe = _colour(identity["shoe_hue"], 0.4, 0.08 + 0.85 * identity["shoe_val"] * identity["shoe_val"])
    shorts, skirt = identity["legs_kind"] < 0.2, identity["legs_kind"] > 0.8
    thick = 0.036 * body.width
    rows, knee, foot = body.canvas.rows(0.42, 1.0), _f32(0.72 + 0 * stride), _f32(0.925 + 0 * stride)
    for sign, shade in ((-1.0, 0.82), (1.0, 1.0)):
        hip = 0.028 * body.width * sign
        ankle_u, knee_u = hip + sign * stride, hip + 0.6 * sign * stride + 0.012
        bare = (shorts | skirt)[:, None]
        calf = np.where(bare, skin, cloth) * np.float32(shade)
        body.limb(rows, (knee_u, knee), (ankle_u, foot), (0.85 * thick, 0.6 * thick), calf)
        body.limb(rows, (hip, knee * 0 + 0.5), (knee_u, knee), (1.2 * thick, 0.9 * thick), cloth * np.float32(shade))
        heel, toe = (ankle_u - 0.008, foot + 0.016), (ankle_u + 0.03, foot + 0.018)
        body.limb(rows, heel, toe, (0.55 * thick, 0.5 * thick), shoe)
    v, u = body.v[:, rows], body.u[:, rows]
    flare = _b(0.05 * body.width) + (v - np.float32(0.48)) * np.float32(0.22)
    cover = np.minimum(flare - np.abs(u), np.minimum(v - np.float32(0.46), np.float32(0.7) - v))
    body.canvas.paint(rows, body.canvas.coverage(cover * _b(body.scale)) * _b(skirt), cloth)


def _draw_torso(body: _Body, identity: Uniforms) -> None:
    coat = _f32(0.52 + 0.1 * (identity["coat"] > 0.75))
    rows = body.canvas.rows(0.12, 0.8)
    v, u = body.v[:, rows], body.u[:, rows]
    shoulder, waist = 0.088 * body.width, 0.066 * body.width
    down = np.clip((v - np.float32(0.2)) / np.float32(0.35), 0, 1)
    half = _b(shoulder) + down * _b(waist - shoulder)
    rounded = np.clip((np.float32(0.24) - v) * np.float32(1.6), 0, 1)
    cover = np.minimum(half - np.abs(u) - rounded, np.minimum(v - np.float32(0.185), _b(coat) - v))
    body.canvas.paint(rows, body.canvas.coverage(cover * _b(body.scale)), _top_colours(u, v, identity))


def _top_colours(u: Floats, v: Floats, identity: Uniforms) -> Floats:
    """Return the upper garment's colour per pixel, [B, 3, h, W]: plain, striped, checked, two-tone or with a print."""
    first = _top(identity)[:, :, None, None]
    second = _colour(identity["top2_hue"], 0.8 * identity["top2_sat"], 0.1 + 0.85 * identity["top2_val"])
    pattern, pitch = _b(identity["pattern"]), _b(0.045 + 0.04 * identity["pattern_size"])
    across = (v / pitch - np.floor(v / pitch)) < np.float32(0.5)
    along = (u / pitch - np.floor(u / pitch)) < np.float32(0.5)
    lower_half = v > np.float32(0.36)
    emblem = (np.abs(u) < pitch * np.float32(0.7)) & (np.abs(v - np.float32(0.3)) < pitch * np.float32(0.8))
    is_second = ((pattern > 0.4) & (pattern <= 0.55) & across) | ((pattern > 0.55) & (pattern <= 0.66) & along)
    is_second |= ((pattern > 0.66) & (pattern <= 0.77) & (across != along)) | (
        (pattern > 0.77) & (pattern <= 0.9) & lower_half
    )
    is_second |= (pattern > 0.9) & emblem
    return np.where(is_second[:, None], second[:, :, None, None], first)


def _draw_arm(body: _Body, identity: Uniforms, swing: Floats, skin: Floats, side: int) -> None:
    shade = np.float32(0.85 if side < 0 else 0.93)
    sleeve = _top(identity) * shade
    lower = np.where((identity["sleeve"] < 0.35)[:, None], skin, sleeve)
    shoulder = side * 0.085 * body.width
    elbow, hand = shoulder + side * 0.018 + 0.4 * swing, shoulder + side * 0.022 + swing
    rows, zero, thick = body.canvas.rows(0.12, 0.75), _f32(0 * swing), 0.024 * body.width
    body.limb(rows, (elbow, zero + 0.37), (hand, zero + 0.5), (0.9 * thick, 0.8 * thick), lower)
    body.limb(rows, (shoulder, zero + 0.225), (elbow, zero + 0.37), (thick, 0.9 * thick), sleeve)
    body.canvas.paint(rows, body.ellipse(rows, (hand, zero + 0.525), (0.8 * thick, 1.1 * thick)), skin)


def _draw_head(body: _Body, identity: Uniforms, skin: Floats) -> None:
    base = np.array(_HAIR, np.float32)[(identity["hair"] * np.float32(4.999)).astype(np.int64)]
    hair = _f32(base * (0.8 + 0.4 * identity["hair_tone"])[:, None])
    style, rows = identity["hair_style"], body.canvas.rows(0.0, 0.42)
    zero = _f32(0 * style)
    body.limb(rows, (zero, zero + 0.15), (zero, zero + 0.2), (zero + 0.02, zero + 0.024), skin)
    long_hair = _b((style > 0.55) & (style <= 0.85))
    fall = body.ellipse(rows, (zero - 0.008, zero + 0.16), (zero + 0.05, zero + 0.085))
    body.canvas.paint(rows, fall * long_hair, hair)
    body.canvas.paint(rows, body.ellipse(rows, (zero, zero + 0.12), (zero + 0.037, zero + 0.052)), skin)
    behind = _b(body.back)
    sideways = _f32(np.where(body.side, -0.014, 0.0))
    bald = _b(style > 0.93)
    cap_v = zero + np.where(body.back, 0.11, 0.088).astype(np.float32)
    cap = body.ellipse(rows, (sideways, cap_v), (zero + 0.041, zero + np.float32(0.034) + 0.02 * body.back))
    body.canvas.paint(rows, cap * (1 - bald * (1 - np.float32(0.2) * behind)), hair)
    body.canvas.paint(rows, fall * long_hair * behind, hair)
    hat = _b((style > 0.85) & (style <= 0.93))
    body.canvas.paint(rows, body.ellipse(rows, (zero + 0.006, zero + 0.085), (zero + 0.05, zero + 0.028)) * hat,
                 _colour(identity["bag_hue"], 0.8, 0.25 + 0.6 * identity["top_val"]))  # fmt: skip


def _draw_bag(body: _Body, worn: NDArray[np.bool_], colour: Floats, centre: tuple[float, float],
              radii: tuple[float, float]) -> None:  # fmt: skip
    rows, zero = body.canvas.rows(centre[1] - 0.2, centre[1] + 0.25), _f32(0 * body.width)
    eu = np.abs(body.u[:, rows] - _b(centre[0] * body.width)) - np.float32(radii[0])
    ev = np.abs(body.v[:, rows] - _b(zero + centre[1])) - np.float32(radii[1])
    cover = body.canvas.coverage(-np.maximum(eu, ev) * _b(body.scale))
    body.canvas.paint(rows, cover * _b(worn), colour)


def _draw_background(canvas: _Canvas, camera: Uniforms, shot: Uniforms) -> None:
    everything, drift = slice(None), _f32(0.12 * (shot["drift"] - 0.5))
    wall = _colour(camera["wall_hue"], 0.45 * camera["wall_sat"], 0.3 + 0.6 * camera["wall_val"])
    floor = _colour(camera["floor_hue"], 0.2, 0.25 + 0.55 * camera["floor_val"])
    shading = np.float32(1.08) - np.float32(0.25) * canvas.y
    canvas.pixels += wall[:, :, None, None] * shading[:, None]
    horizon = _b(0.5 + 0.35 * camera["horizon"])
    ground = canvas.coverage(canvas.y - horizon + 0 * canvas.x)
    tile = _b(0.05 + 0.1 * camera["tiles"])
    x = canvas.x + _b(drift)
    joint = (x / tile - np.floor(x / tile)) < np.float32(0.12)
    grout = np.float32(0.18) * joint[:, None] * (camera["tiles"] > 0.4)[:, None, None, None]
    tiled = floor[:, :, None, None] * (1 - grout)
    canvas.paint(everything, ground, (tiled * np.ones_like(canvas.pixels)).astype(np.float32))
    box_u = np.abs(x - _b(0.5 * camera["box_x"])) - _b(0.04 + 0.1 * camera["box_w"])
    box_v = np.abs(canvas.y - _b(0.15 + 0.45 * camera["box_y"])) - _b(0.05 + 0.15 * camera["box_h"])
    canvas.paint(everything, canvas.coverage(-np.maximum(box_u, box_v)),
                 _colour(camera["box_hue"], 0.5, 0.2 + 0.7 * camera["box_val"]))  # fmt: skip
    post = _b(0.008 + 0.02 * camera["post_w"]) - np.abs(x - _b(0.5 * camera["post_x"])) + 0 * canvas.y
    canvas.paint(everything, canvas.coverage(post), _grey(0.1 + 0.6 * camera["post_val"]))


def _draw_occluder(canvas: _Canvas, shot: Uniforms) -> None:
    """In one picture of six something stands in front: a low wall, or a pole."""
    low = (shot["occluder"] < 0.09)[:, None, None]
    pole = ((shot["occluder"] >= 0.09) & (shot["occluder"] < 0.17))[:, None, None]
    wall = canvas.y - _b(0.68 + 0.22 * shot["occ_y"]) + 0 * canvas.x
    bar = np.float32(0.022) - np.abs(canvas.x - _b(0.12 + 0.26 * shot["occ_x"])) + 0 * canvas.y
    cover = canvas.coverage(np.where(low, wall, bar)) * (low | pole)
    canvas.paint(slice(None), cover.astype(np.float32), _grey(0.15 + 0.6 * shot["occ_val"]))


def _take_photo(pixels: Floats, camera: Uniforms, shot: Uniforms, noise: Floats) -> Floats:
    """Blur, light, contrast, colour cast, haze and noise; returns [B, 3, H, W] in [0, 1]."""
    strength = _b(0.75 * camera["blur"])[:, None]
    for axis in (2, 3):
        pixels = pixels + strength * (_box3(pixels, axis) - pixels)
    light = (0.62 + 0.5 * camera["light"]) * (0.88 + 0.24 * shot["light"])
    cast = np.stack([camera["cast_r"], camera["cast_g"], camera["cast_b"]], axis=1)
    gain = (0.7 + 0.6 * cast + 0.1 * (shot["cast"][:, None] - 0.5)) * light[:, None]
    columns = (np.arange(pixels.shape[3], dtype=np.float32) / np.float32(pixels.shape[3]))[None, None, None, :]
    slope = np.float32(0.5) * (camera["side_light"] - np.float32(0.5))[:, None, None, None]
    pixels = pixels * _f32(gain)[:, :, None, None] * (1 + slope * (columns - np.float32(0.5)))
    contrast, haze = _b(0.6 + 0.5 * camera["contrast"])[:, None], _b(0.12 * camera["haze"])[:, None]
    pixels = (pixels - np.float32(0.45)) * contrast + np.float32(0.45) + haze
    grain = (noise - np.float32(0.5)) * _b(0.04 + 0.1 * shot["noise"])
    return np.clip(pixels + grain[:, None], 0, 1)


def _box3(pixels: Floats, axis: int) -> Floats:
    """Mean of three neighbours along ``axis``; the border repeats."""
    padded = np.concatenate([pixels.take([0], axis), pixels, pixels.take([-1], axis)], axis)
    length = pixels.shape[axis]
    left, middle, right = (padded.take(range(i, i + length), axis) for i in range(3))
    mean: Floats = (left + middle + right) / np.float32(3)
    return mean


def _b(values: Floats | NDArray[np.bool_]) -> Floats:
    """Shape [B] -> [B, 1, 1], float32."""
    return values.astype(np.float32)[:, None, None]


def _f32(values: Floats) -> Floats:
    return values.astype(np.float32)


def _grey(value: Floats) -> Floats:
    return _f32(np.stack([value, value, value], axis=1))


def _top(identity: Uniforms) -> Floats:
    return _colour(identity["top_hue"], 0.85 * identity["top_sat"], 0.12 + 0.85 * identity["top_val"])


def _colour(hue: Floats, saturation: Floats | float, value: Floats) -> Floats:
    """HSV in [0, 1] -> RGB [B, 3] (piecewise linear, so exact)."""
    offsets = np.array([5.0, 3.0, 1.0], np.float32)
    k = offsets + np.float32(6) * hue[:, None]
    k = k - np.float32(6) * np.floor(k / np.float32(6))
    ramp = np.clip(np.minimum(k, np.float32(4) - k), 0, 1)
    share = saturation if isinstance(saturation, float) else saturation[:, None]
    return _f32(value[:, None] * (1 - np.float32(1) * share * ramp))
