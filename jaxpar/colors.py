"""Colors of curves and bars, which differ for the colour-blind and are visible on white."""

# Those of Okabe and Ito, "Color Universal Design", 2008, with a grey and a brown. The first is that of a reference.
CURVE_COLORS = ("#595959", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#661100")
