"""Scripts: one for each task, readable in one sitting; shipped in the wheel as modelcenter.scripts."""
