-- Changes nothing, but is refused where nothing can be changed. (BEGIN IMMEDIATE is not: it turns into a read.)
DELETE FROM onceward_record
WHERE false
