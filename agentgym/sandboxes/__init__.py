"""The host side of a box: never imports environments or rollouts."""
