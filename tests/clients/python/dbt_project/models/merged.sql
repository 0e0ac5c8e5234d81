{{ config(materialized='incremental', unique_key='model', on_schema_change='append_new_columns') }}
select model, count(*) as n, max(day) as last_day from {{ ref('rows') }}
{% if is_incremental() %} where day >= (select max(last_day) from {{ this }}) {% endif %}
group by model
