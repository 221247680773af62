"""Weight conversion as data: an architecture's rules compile to pieces that load, export and prove themselves."""
