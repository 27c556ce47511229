-- Whether the table and its index are there already, wherever the search path finds them.
SELECT to_regclass('onceward_receipt') IS NOT NULL AND to_regclass('onceward_receipt_created_at') IS NOT NULL AS made
