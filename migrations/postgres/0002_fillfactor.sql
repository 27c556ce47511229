-- Room for the larger row of a finished record beside the row of its reservation, so that the Complete is a HOT update: less
-- log, no new entries in the indexes, and in the end, for all but the smallest results, a smaller table than with fuller pages
-- (docs/performance.md). It holds for new pages.
ALTER TABLE onceward_record SET (fillfactor = 40);
